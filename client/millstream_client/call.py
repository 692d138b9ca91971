"""One request, over as many sockets as it takes: what to send on the next, what to make of frames.

Pure. Tokens are passed on once and in order: what comes again is dropped, a gap is an error.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from millstream_client import records
from millstream_client.errors import Cancelled, LogLost, MillstreamError, error_of
from millstream_client.records import Chunk, Done, Frame, Result, Started

LIMIT_BYTES = 256 * 1024  # of frames that wait for the reader of one request


class Call:
    """The state of one request. `ask` is its opening frame without `id`; `changed` is called when
    there is something new to see.

    A reader may be slower than its request. Once `LIMIT_BYTES` wait for it the call is `behind`: it
    wants no more frames, until its reader has taken everything and it is opened anew.
    """

    left = False  # by its reader

    def __init__(self, ask: Mapping[str, Any], changed: Callable[[], None]) -> None:
        self.ask, self.changed = ask, changed
        self.request_id: str | None = None
        self.started: Started | None = None
        self.outcome: Done | Result | MillstreamError | None = None
        self.cancel_wanted = False
        self.behind = False
        self.sent = False  # its opening frame, and no error has answered it
        self.size = 0  # bytes of its opening frame
        self.refusals = 0
        self.held_since = 0.0  # since when it has waited for a gateway to take it (or take it back)
        self._waiting: deque[tuple[Chunk, int]] = deque()
        self._bytes = 0
        self._after = -1  # index of the last token received
        self._source: str | None = None  # the request that the tokens are of

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    @property
    def accepted(self) -> bool:
        """True once it is durable: from then on it is resumed, not sent again."""
        return self.request_id is not None

    @property
    def may_run(self) -> bool:
        """True while some gateway may have it, whether or not it has said so."""
        return self.sent or self.accepted

    def opening(self) -> dict[str, Any]:
        """The frame, but for its `id`, that opens this request on a socket."""
        if self.request_id is None:
            return {**self.ask}
        return {"type": "resume", "request_id": self.request_id, "after": self._after}

    def unaccept(self) -> None:
        """Nobody knows the request: it must be sent again (under the same idempotency key).

        Where the key is forgotten too that makes another request, whose tokens may be others.
        """
        self.request_id = None

    def take(self) -> Chunk | None:
        """The next chunk, None while there is none."""
        if not self._waiting:
            return None
        chunk, size = self._waiting.popleft()
        self._bytes -= size
        return chunk

    def fail(self, error: MillstreamError) -> None:
        """End it, unless it has ended."""
        self._end(error)
        self.changed()

    def receive(self, frame: Frame, size: int) -> None:
        """Take a frame of `size` bytes; types that are not known are passed over."""
        match frame["type"]:
            case "accepted":
                self._accept(frame["request_id"])
            case "started":
                self.started = records.known(Started, frame)
            case "chunk":
                self._receive_chunk(records.chunk(frame), size)
            case "done":
                self._done(records.done(frame))
            case "result":
                self._end(records.result(frame))
            case "error":
                self._end(error_of(frame))
        self.changed()

    def _accept(self, request_id: str) -> None:
        self.request_id, self.refusals = request_id, 0
        if self._after >= 0 and request_id != self._source:
            self._end(LogLost(f"the request is forgotten, of which token {self._after} had come"))
        self._source = request_id

    def _receive_chunk(self, chunk: Chunk, size: int) -> None:
        if chunk.index > self._after + 1 or chunk.index <= self._after < _last(chunk):
            self._end(LogLost(f"token {self._after + 1} is missing, {chunk.index} came"))
        elif chunk.index == self._after + 1:
            self._after = _last(chunk)
            self._waiting.append((chunk, size))
            self._bytes += size
            self.behind = self._bytes >= LIMIT_BYTES

    def _done(self, done: Done) -> None:
        if done.finish_reason == "cancelled" and not self.cancel_wanted:
            self._end(Cancelled("the request was cancelled, and not by this client's wish"))
        else:
            self._end(done)

    def _end(self, outcome: Done | Result | MillstreamError) -> None:
        self.outcome = self.outcome or outcome


class Parting(Call):
    """What remains of a call that nobody reads any more: its end is wanted, and no token of it."""

    left = True

    def __init__(self, call: Call) -> None:
        super().__init__(call.ask, changed=lambda: None)
        self.request_id, self._after, self._source = call.request_id, call._after, call._source
        self.size, self.sent = call.size, call.sent
        self.cancel_wanted = True

    def _receive_chunk(self, chunk: Chunk, size: int) -> None:
        """Passed over."""


def _last(chunk: Chunk) -> int:
    return chunk.index + chunk.count - 1

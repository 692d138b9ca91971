"""One request, over as many sockets as it takes: what to send on the next, what to make of frames.

Pure. Tokens are passed on once and in order: what comes again is dropped, a gap is an error.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from millstream_client import records
from millstream_client.errors import Cancelled, LogLost, MillstreamError, error_of
from millstream_client.records import Chunk, Done, Frame, Result, Started

BUFFER_BYTES = 256 * 1024  # of frames that wait for the reader of one request


class RequestState:
    """The state of one request. `ask` is its opening frame without `id`; `changed` is called when
    there is something new to see.

    A reader may be slower than its request. Once `LIMIT_BYTES` wait for it the call is `behind`: it
    wants no more frames, until its reader has taken everything and it is opened anew.
    """

    is_abandoned = False  # by its reader

    def __init__(self, ask: Mapping[str, Any], changed: Callable[[], None]) -> None:
        self.request_frame, self.on_change = ask, changed
        self.request_id: str | None = None
        self.started: Started | None = None
        self.outcome: Done | Result | MillstreamError | None = None
        self.cancel_requested = False
        self.is_behind = False
        self.is_sent = False  # its opening frame, and no error has answered it
        self.opening_bytes = 0  # bytes of its opening frame
        self.refusals = 0
        # Since when it has waited for a gateway to take it (or take it back)
        self.waiting_since = 0.0
        self._buffered: deque[tuple[Chunk, int]] = deque()
        self._buffered_bytes = 0
        self._last_received = -1  # index of the last token received
        self._source_request_id: str | None = None  # the request that the tokens are of

    @property
    def is_ended(self) -> bool:
        return self.outcome is not None

    @property
    def is_accepted(self) -> bool:
        """True once it is durable: from then on it is resumed, not sent again."""
        return self.request_id is not None

    @property
    def may_run(self) -> bool:
        """True while some gateway may have it, whether or not it has said so."""
        return self.is_sent or self.is_accepted

    def make_opening_frame(self) -> dict[str, Any]:
        """The frame, but for its `id`, that opens this request on a socket."""
        if self.request_id is None:
            return {**self.request_frame}
        return {"type": "resume", "request_id": self.request_id, "after": self._last_received}

    def reset_acceptance(self) -> None:
        """Nobody knows the request: it must be sent again (under the same idempotency key).

        Where the key is forgotten too that makes another request, whose tokens may be others.
        """
        self.request_id = None

    def next_chunk(self) -> Chunk | None:
        """The next chunk, None while there is none."""
        if not self._buffered:
            return None
        chunk, size = self._buffered.popleft()
        self._buffered_bytes -= size
        return chunk

    def fail(self, error: MillstreamError) -> None:
        """End it, unless it has ended."""
        self._finish(error)
        self.on_change()

    def receive(self, frame: Frame, size: int) -> None:
        """Take a frame of `size` bytes; types that are not known are passed over."""
        match frame["type"]:
            case "accepted":
                self._receive_accepted(frame["request_id"])
            case "started":
                self.started = records.build_record(Started, frame)
            case "chunk":
                self._receive_chunk(records.parse_chunk(frame), size)
            case "done":
                self._receive_done(records.parse_done(frame))
            case "result":
                self._finish(records.parse_result(frame))
            case "error":
                self._finish(error_of(frame))
        self.on_change()

    def _receive_accepted(self, request_id: str) -> None:
        self.request_id, self.refusals = request_id, 0
        if self._last_received >= 0 and request_id != self._source_request_id:
            self._finish(
                LogLost(f"the request is forgotten, of which token {self._last_received} had come")
            )
        self._source_request_id = request_id

    def _receive_chunk(self, chunk: Chunk, size: int) -> None:
        if (
            chunk.index > self._last_received + 1
            or chunk.index <= self._last_received < _last_index(chunk)
        ):
            self._finish(LogLost(f"token {self._last_received + 1} is missing, {chunk.index} came"))
        elif chunk.index == self._last_received + 1:
            self._last_received = _last_index(chunk)
            self._buffered.append((chunk, size))
            self._buffered_bytes += size
            self.is_behind = self._buffered_bytes >= BUFFER_BYTES

    def _receive_done(self, done: Done) -> None:
        if done.finish_reason == "cancelled" and not self.cancel_requested:
            self._finish(Cancelled("the request was cancelled, and not by this client's wish"))
        else:
            self._finish(done)

    def _finish(self, outcome: Done | Result | MillstreamError) -> None:
        self.outcome = self.outcome or outcome


class AbandonedRequest(RequestState):
    """What remains of a call that nobody reads any more: its end is wanted, and no token of it."""

    is_abandoned = True

    def __init__(self, call: RequestState) -> None:
        super().__init__(call.request_frame, changed=lambda: None)
        self.request_id, self._last_received, self._source_request_id = (
            call.request_id,
            call._last_received,
            call._source_request_id,
        )
        self.opening_bytes, self.is_sent = call.opening_bytes, call.is_sent
        self.cancel_requested = True

    def _receive_chunk(self, chunk: Chunk, size: int) -> None:
        """Passed over."""


def _last_index(chunk: Chunk) -> int:
    return chunk.index + chunk.count - 1

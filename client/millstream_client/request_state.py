"""The state of one request across connections: the frame to open it, and the tokens received.

Pure. Tokens are passed on once and in order: repeated ones are dropped, a gap is an error.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from millstream_client import records
from millstream_client.errors import Cancelled, LogLost, MillstreamError, error_of
from millstream_client.records import Chunk, Done, Frame, Result, Started, Waking

BUFFER_BYTES = 256 * 1024  # of frames buffered for the reader of one request


class RequestState:
    """One request as its session and its reader share it: the session writes, the reader reads.

    `frame` is the frame that opens the request, without `id`. `on_change` is called after each
    received frame and when the request fails. Once 256 KiB (`BUFFER_BYTES`) of frames are unread,
    `is_behind` becomes True and the request receives no more frames, until its reader has read all
    of them and has had the session resume it. `outcome` is None until the request has ended.
    """

    is_abandoned = False  # True when its reader has left

    def __init__(self, frame: Mapping[str, Any], on_change: Callable[[], None]) -> None:
        self.request_frame, self.on_change = frame, on_change
        self.request_id: str | None = None
        self.started: Started | None = None
        self.waking: Waking | None = None
        self.outcome: Done | Result | MillstreamError | None = None
        self.cancel_requested = False
        self.is_behind = False
        self.is_sent = False  # its opening frame was sent, and not answered by an error
        self.opening_bytes = 0  # size of its opening frame
        self.refusals = 0
        self.waiting_since = 0.0  # when it began to wait for a gateway to accept or resume it
        self._buffered: deque[tuple[Chunk, int]] = deque()
        self._buffered_bytes = 0
        self._last_received = -1  # index of the last token received
        self._characters = 0  # in the text received
        self._has_text_behind = False  # the last chunk received had no tokens
        self._source_request_id: str | None = None  # request id under which tokens were received

    @property
    def is_ended(self) -> bool:
        """True once the request has its outcome: the end of a generation, a result, or an error."""
        return self.outcome is not None

    @property
    def is_accepted(self) -> bool:
        """True if a gateway has confirmed that the request is stored.

        On another connection such a request is resumed; one that is not accepted is sent again.
        """
        return self.request_id is not None

    @property
    def may_run(self) -> bool:
        """True if a gateway may have stored the request, even if none has confirmed it.

        False if the request was never sent, or if a gateway answered it with an error before
        accepting it.
        """
        return self.is_sent or self.is_accepted

    def make_opening_frame(self) -> dict[str, Any]:
        """Return the frame, without `id`, with which this request is opened on a connection.

        For a request that was accepted, this is a `resume` frame that asks for the output after the
        last token received; for any other, the request itself. If text has come behind that token,
        the frame says how much.
        """
        if self.request_id is None:
            return {**self.request_frame}
        text = {"characters": self._characters} if self._has_text_behind else {}
        after = {"after": self._last_received, **text}
        return {"type": "resume", "request_id": self.request_id, **after}

    def reset_acceptance(self) -> None:
        """Mark the request as not accepted, so that its next frame is the request itself.

        Called when a gateway does not know the request id any more. The request keeps its
        idempotency key. If the gateways have forgotten that key too, they make a new request of it,
        whose tokens may differ.
        """
        self.request_id = None

    def next_chunk(self) -> Chunk | None:
        """Remove the oldest unread chunk from the buffer and return it, without waiting.

        Returns None if the buffer is empty, which may be before or after the request's end.
        """
        if not self._buffered:
            return None
        chunk, size = self._buffered.popleft()
        self._buffered_bytes -= size
        return chunk

    def fail(self, error: MillstreamError) -> None:
        """Set `error` as the outcome, unless the request has ended already; then call `on_change`.

        `error` is not raised here; the reader raises it.
        """
        self._finish(error)
        self.on_change()

    def receive(self, frame: Frame, size: int) -> None:
        """Apply one received frame of `size` bytes to the state, and call `on_change`.

        A frame of unknown type changes nothing. Tokens received before are dropped. A gap before a
        token ends the request with `LogLost` as its outcome, which is not raised. Raises
        `KeyError`, `TypeError` or `ValueError` for a malformed frame.
        """
        match frame["type"]:
            case "accepted":
                self._receive_accepted(frame["request_id"])
            case "waking":
                self.waking = records.build_record(Waking, frame)
            case "started":
                self.waking, self.started = None, records.build_record(Started, frame)
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
            self._characters += len(chunk.text)
            self._has_text_behind = chunk.count == 0
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
    """Takes the place of a request whose reader has left, until a gateway confirms its end.

    The session keeps it only to cancel the request at the gateway, on a later connection if need
    be. Tokens that still come are ignored, and nobody is told of the outcome.
    """

    is_abandoned = True

    def __init__(self, request: RequestState) -> None:
        super().__init__(request.request_frame, on_change=lambda: None)
        self.request_id, self._source_request_id = request.request_id, request._source_request_id
        self._last_received, self._characters = request._last_received, request._characters
        self._has_text_behind = request._has_text_behind
        self.opening_bytes, self.is_sent = request.opening_bytes, request.is_sent
        self.cancel_requested = True

    def _receive_chunk(self, chunk: Chunk, size: int) -> None:
        """Ignore the chunk."""


def _last_index(chunk: Chunk) -> int:
    return chunk.index + chunk.count - 1

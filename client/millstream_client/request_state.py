"""The state of one request across connections: the frame to open it, and the tokens received.

Pure. Tokens are passed on once and in order: repeated ones are dropped, a gap is an error.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from millstream_client import records
from millstream_client.errors import Cancelled, LogLost, MillstreamError, error_of
from millstream_client.records import Chunk, Done, Frame, Result, Started

BUFFER_BYTES = 256 * 1024  # of frames buffered for the reader of one request


class RequestState:
    """One request as a session and its reader share it: what to send, what has come, how it ended.

    `frame` is its opening frame without `id`. `on_change` is called after each frame and when the
    request fails. A reader may be slower than its request: once `BUFFER_BYTES` wait for it, the
    request `is_behind` and receives no more frames until its reader has read everything and the
    session has resumed it.
    """

    is_abandoned = False  # True when its reader has left

    def __init__(self, frame: Mapping[str, Any], on_change: Callable[[], None]) -> None:
        self.request_frame, self.on_change = frame, on_change
        self.request_id: str | None = None
        self.started: Started | None = None
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
        self._source_request_id: str | None = None  # request id under which tokens were received

    @property
    def is_ended(self) -> bool:
        """True once the request has its outcome: the end of a generation, a result, or an error."""
        return self.outcome is not None

    @property
    def is_accepted(self) -> bool:
        """True once a gateway has stored the request: it is then resumed, not sent again."""
        return self.request_id is not None

    @property
    def may_run(self) -> bool:
        """True if some gateway may have the request, though perhaps none has confirmed that."""
        return self.is_sent or self.is_accepted

    def make_opening_frame(self) -> dict[str, Any]:
        """Return the frame, without `id`, that opens this request on a connection.

        It resumes a request that was accepted, after the last token received.
        """
        if self.request_id is None:
            return {**self.request_frame}
        return {"type": "resume", "request_id": self.request_id, "after": self._last_received}

    def reset_acceptance(self) -> None:
        """Mark the request as unknown to the gateways, so that it is sent again with the same key.

        If its idempotency key is forgotten as well, that makes another request, whose tokens may
        differ.
        """
        self.request_id = None

    def next_chunk(self) -> Chunk | None:
        """Remove and return the next buffered chunk; None if none has come. Does not wait."""
        if not self._buffered:
            return None
        chunk, size = self._buffered.popleft()
        self._buffered_bytes -= size
        return chunk

    def fail(self, error: MillstreamError) -> None:
        """End the request with `error`, unless it has ended, and call `on_change`."""
        self._finish(error)
        self.on_change()

    def receive(self, frame: Frame, size: int) -> None:
        """Apply a received frame of `size` bytes; frames of unknown types are ignored.

        Repeated tokens are dropped; a missing token ends the request with `LogLost`. Raises
        `KeyError`, `TypeError` or `ValueError` for a malformed frame.
        """
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
    """Stands for a request whose reader has left, until a gateway confirms that it has ended.

    It is cancelled, and its tokens are ignored.
    """

    is_abandoned = True

    def __init__(self, request: RequestState) -> None:
        super().__init__(request.request_frame, on_change=lambda: None)
        self.request_id, self._last_received, self._source_request_id = (
            request.request_id,
            request._last_received,
            request._source_request_id,
        )
        self.opening_bytes, self.is_sent = request.opening_bytes, request.is_sent
        self.cancel_requested = True

    def _receive_chunk(self, chunk: Chunk, size: int) -> None:
        """Ignore the chunk."""


def _last_index(chunk: Chunk) -> int:
    return chunk.index + chunk.count - 1

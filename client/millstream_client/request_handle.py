"""The caller's handles of a request, with which it is read, cancelled and closed."""

import asyncio
from types import TracebackType
from typing import Any, Self

from millstream_client.errors import DeadlineExceeded, MillstreamError
from millstream_client.records import Chunk, Done, Result, Started, Waking
from millstream_client.request_state import RequestState
from millstream_client.session import Session


class RequestHandle:
    """The caller's handle of one request: `async with` or the first `await` sends the request.

    A request that has not ended is cancelled when its handle's context is left. Without a context
    it is cancelled when the task that waits for it is cancelled. In both cases it is cancelled when
    the last reference to the handle is dropped. `deadline` is the number of seconds, from the
    sending, after which the request fails with `DeadlineExceeded`; None sets no limit here.
    """

    def __init__(self, session: Session, frame: dict[str, Any], deadline: float | None) -> None:
        self._changed = asyncio.Event()
        self._state = RequestState(frame, self._changed.set)
        self._session, self._deadline = session, deadline
        self._has_context = False
        self._loop: asyncio.AbstractEventLoop | None = None  # set when the request is submitted
        self._deadline_at: float | None = None

    @property
    def request_id(self) -> str | None:
        """The gateway's id of the request, for logs and `millstream why`; None until accepted."""
        return self._state.request_id

    @property
    def started(self) -> Started | None:
        """The model and version that run the request, and the number of the worker's attempt.

        None until a worker has begun the request.
        """
        return self._state.started

    @property
    def waking(self) -> Waking | None:
        """The progress of the model's first worker; None unless the request waits for it.

        It changes with the phase, or when the expected time has moved by more than a second.
        """
        return self._state.waking

    async def __aenter__(self) -> Self:
        """Send the request and return once it is stored durably. Raises its error if it fails."""
        try:
            await self._wait_until_accepted()
        except BaseException:
            self.close()
            raise
        self._has_context = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        """Cancel a request whose reader left an `async for` by `break`, which has no other sign."""
        if self._loop and not self._state.is_ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._session.abandon, self._state)

    def cancel(self) -> None:
        """Ask the gateway to end the request early; returns at once. Idempotent.

        The tokens generated until then can still be read. The answer then ends with the finish
        reason `cancelled` instead of an error. A request that has ended is not changed.
        """
        self._session.cancel(self._state)

    def close(self) -> None:
        """Cancel the request and receive nothing more of it; returns at once. Idempotent.

        Later reads return the chunks that have been received already, then raise `Cancelled`. A
        request that has ended or was never sent is not changed.
        """
        self._session.abandon(self._state)

    async def outcome(self) -> Done | Result:
        """Send the request if it was not sent, wait for its end, and return how it ended.

        A generation returns `Done`, `embed` and `classify` return `Result`. Raises the
        `MillstreamError` with which the request failed or was refused, or `DeadlineExceeded`. Read
        the chunks of a `Stream` before: while 256 KiB or more of them are unread, the end is not
        received and this waits. Cancelling this call cancels the request, unless the handle is used
        as a context.
        """
        self._submit_once()
        while not self._state.is_ended:
            await self._wait_for_change()
        return self._unwrap_outcome()

    async def _wait_until_accepted(self) -> None:
        self._submit_once()
        while not self._state.is_accepted and not self._state.is_ended:
            await self._wait_for_change()
        if self._state.is_ended:
            self._unwrap_outcome()

    def _submit_once(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._deadline is not None:
                self._deadline_at = self._loop.time() + self._deadline
            self._session.submit(self._state)

    async def _wait_for_change(self) -> None:
        """Wait until the state changes. Closes the request and raises `DeadlineExceeded` in time.

        Cancelling closes the request too, unless it is used as a context.
        """
        self._changed.clear()
        try:
            async with asyncio.timeout_at(self._deadline_at):
                await self._changed.wait()
        except TimeoutError:
            self.close()
            raise DeadlineExceeded(f"not done within {self._deadline:g} s") from None
        except asyncio.CancelledError:
            if not self._has_context:
                self.close()
            raise

    def _unwrap_outcome(self) -> Done | Result:
        outcome = self._state.outcome
        assert outcome  # set for a request that has ended
        if isinstance(outcome, MillstreamError):
            raise outcome
        return outcome


class Stream(RequestHandle):
    """The handle of a generation: read its chunks with `async for`, or all its text with `text()`.

    A slow reader does not slow down other requests. Once 256 KiB of unread chunks are buffered, no
    more are received; when the reader has read all of them, the rest is fetched from the gateway.
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk. Raises the error in which the request ended.

        Within the stream's context this may be cancelled, for example by a timeout, without losing
        a token.
        """
        self._submit_once()
        while (chunk := self._state.next_chunk()) is None:
            if self._state.is_ended:
                self._unwrap_outcome()
                raise StopAsyncIteration
            if self._state.is_behind:
                self._session.resume(self._state)
            await self._wait_for_change()
        return chunk

    async def text(self) -> str:
        """Wait for the end of the answer and return the text that has not been read before.

        Sends the request if it was not sent. `done` is set afterwards. Raises the `MillstreamError`
        with which the request failed or was refused, or `DeadlineExceeded`; the text received until
        then is lost.
        """
        return "".join([chunk.text async for chunk in self])

    @property
    def done(self) -> Done | None:
        """The finish reason, token usage and timing of the answer.

        None until its end has been received, and if the request has failed.
        """
        outcome = self._state.outcome
        return outcome if isinstance(outcome, Done) else None

"""The caller's handles of a request, with which it is read, cancelled and closed."""

import asyncio
from types import TracebackType
from typing import Any, Self

from millstream_client.errors import DeadlineExceeded, MillstreamError
from millstream_client.records import Chunk, Done, Result, Started
from millstream_client.request_state import RequestState
from millstream_client.session import Session


class RequestHandle:
    """A handle of one request, which is sent when the handle is entered or first awaited.

    The request is cancelled when it is left before its end: by leaving the context or, without a
    context, by cancelling the task that waits for it, or by dropping the last reference to the
    handle. `deadline` is in seconds from when it is first sent.
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
        """The model, version and attempt that run the request; None until a worker begins it."""
        return self._state.started

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
        """Ask the gateway to end the request; returns at once. Idempotent.

        The tokens generated until then can still be read; then the answer ends with the finish
        reason `cancelled`, without an error.
        """
        self._session.cancel(self._state)

    def close(self) -> None:
        """Cancel the request and stop receiving it; returns at once. Idempotent.

        Later reads return chunks that are here already, then raise `Cancelled`. No effect on a
        request that has ended or was never sent.
        """
        self._session.abandon(self._state)

    async def outcome(self) -> Done | Result:
        """Send the request unless that was done, wait for its end, and return that.

        Raises the `MillstreamError` in which the request ended, or `DeadlineExceeded`. On a
        `Stream`, read the chunks first: while more than 256 KiB of them are unread, the end does
        not come. Cancelling cancels the request, unless the handle is used as a context.
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
    """A generation: iterate over its chunks, or await its whole `text()`.

    A slow reader does not slow other requests: once 256 KiB of chunks wait for it, no more are
    received until it has read them; the rest is then fetched.
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
        """Wait for the rest of the answer and return its text; what was read before is left out.

        `done` is then set. Raises the `MillstreamError` in which the request ended, or
        `DeadlineExceeded`.
        """
        return "".join([chunk.text async for chunk in self])

    @property
    def done(self) -> Done | None:
        """The finish reason, usage and timing; None before the end, and after an error."""
        outcome = self._state.outcome
        return outcome if isinstance(outcome, Done) else None

"""The socket that all requests of a client share, opened anew as often as it takes.

A call is in one of three places: it waits to be opened, it is open under an id of the socket's, or
its reader has something to take first. When the socket drops, what was open waits again; on the
next socket it is resumed, or sent again under its idempotency key if it was never accepted.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterable
from itertools import count

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from millstream_client.backoff import Backoff
from millstream_client.budget import RetryBudget
from millstream_client.call import Call
from millstream_client.dialer import Dialer
from millstream_client.errors import (
    BadRequest,
    Cancelled,
    MillstreamError,
    NotConnected,
    PayloadTooLarge,
    RequestNotFound,
    error_of,
)

log = logging.getLogger(__name__)

MOST_OPEN = 1000  # the gateway takes 1024 of one socket; what a `resume` follows on counts twice
PING_SECONDS = 2.0
PONG_SECONDS = 3.0  # a gateway that is silent for longer is frozen, or out of reach
_TOO_BIG, _GARBLED = 1009, 1002


class Session:
    """All calls of one client, from its making to `close`.

    `patience` is how long, in seconds, a call may be held up by gateways that refuse it or cannot
    be reached.
    """

    def __init__(self, dialer: Dialer, patience: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._dialer, self._patience = dialer, patience
        self._budget = RetryBudget(self._loop.time())
        self._backoff = Backoff(first=0.25, most=8.0)
        self._calls: dict[Call, str | None] = {}  # those under way, each with its id while open
        self._open: dict[str, Call] = {}
        self._waiting: deque[Call] = deque()
        self._ids = count(1)
        self._outgoing: asyncio.Queue[str | None] | None = None  # of the socket, while there is one
        self._wanted = asyncio.Event()
        self._closed = False
        self.gateway: str | None = None  # the socket's URL, while there is one
        self._running = asyncio.create_task(self._run(), name="millstream-client")

    # --- what readers do ----------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Take a call under way; it tells of all that follows by `changed`."""
        if self._closed:
            raise NotConnected("this client is closed")
        self._budget.deposit()
        self._calls[call] = None
        call.held_since = self._loop.time()
        self._queue(call)

    def cancel(self, call: Call) -> None:
        """Ask for its end, which comes as a `done` frame."""
        call.cancel_wanted = True
        if id := self._calls.get(call):
            self._put({"type": "cancel", "id": id})

    def let_go(self, call: Call) -> None:
        """Its reader has left: cancel it and forget it. Idempotent."""
        if call in self._calls:
            self.cancel(call)
            self._fail(call, Cancelled("it was left by its reader"))

    def catch_up(self, call: Call) -> None:
        """A call that was behind has been read to the end of what had come."""
        call.behind = False
        self._queue(call)

    async def close(self) -> None:
        """Cancel all calls and part from the gateway. Idempotent."""
        self._closed = True
        for call in [*self._calls]:
            self.let_go(call)
        if self._outgoing:
            self._outgoing.put_nowait(None)
        else:
            self._running.cancel()
        try:
            await asyncio.wait({self._running})
        finally:
            self._running.cancel()

    # --- the socket ---------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep a socket open as long as anybody wants one."""
        try:
            while not self._closed:
                if dialled := await self._dialled():
                    await self._serve(*dialled)
                else:
                    await self._wanted.wait()
        finally:
            self._closed = True
            self._fail_all([*self._calls], NotConnected("this client is closed"))

    async def _dialled(self) -> tuple[str, ClientConnection] | None:
        """The next socket; None when nobody wants one any more."""
        while self._has_waiting():
            await asyncio.sleep(self._dialer.pause())
            try:
                return await self._dialer.dial()
            except BadRequest as error:
                self._fail_all([*self._waiting], error)
            except MillstreamError as error:
                log.info("not connected: %s", error)
                self._give_up(error)
        self._wanted.clear()
        return None

    def _has_waiting(self) -> bool:
        self._waiting = deque(call for call in self._waiting if not call.ended)
        return bool(self._waiting)

    def _give_up(self, error: MillstreamError) -> None:
        """End what has waited for a gateway for too long."""
        since = self._loop.time() - self._patience
        late = [call for call in self._waiting if call.held_since <= since]
        self._fail_all(
            late, NotConnected(f"no gateway within {self._patience:g} s: {error.message}")
        )

    async def _serve(self, url: str, socket: ClientConnection) -> None:
        """Use a socket until it is lost or closed."""
        self.gateway, self._outgoing = url, asyncio.Queue()
        self._open_waiting()
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write(socket, self._outgoing), name="write")
                watching = tasks.create_task(self._watch(socket, tasks), name="watch")
                await self._read(socket)
                writing.cancel()
                watching.cancel()
        finally:
            socket.transport.abort()
            self._lost(socket)

    async def _read(self, socket: ClientConnection) -> None:
        try:
            async for data in socket:
                self._receive(data)
                self._dialer.works()
        except ConnectionClosed as closed:
            log.info("lost %s: %s", self.gateway, closed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s sent what is no frame: %r", self.gateway, error)
            await socket.close(_GARBLED)

    async def _write(self, socket: ClientConnection, outgoing: asyncio.Queue[str | None]) -> None:
        try:
            while (text := await outgoing.get()) is not None:
                await socket.send(text)
            await socket.close()
        except ConnectionClosed:
            pass  # which ends the reading too

    async def _watch(self, socket: ClientConnection, tasks: asyncio.TaskGroup) -> None:
        """Cut a socket whose gateway does not answer.

        A task is looked at, rather than cancelled by a timeout: where it is this process that was
        busy, the pong is there by then.
        """
        while True:
            ping = tasks.create_task(_ping(socket), name="ping")
            await asyncio.wait({ping}, timeout=PONG_SECONDS)
            if not ping.done():
                log.warning("%s is silent", self.gateway)
                ping.cancel()
                socket.transport.abort()
                return
            await asyncio.sleep(PING_SECONDS)

    def _lost(self, socket: ClientConnection) -> None:
        self.gateway, self._outgoing = None, None
        if socket.close_code == _TOO_BIG:
            self._fail_largest(PayloadTooLarge("the gateway does not take a frame of this size"))
        for call in self._open.values():
            self._calls[call] = None
            call.held_since = self._loop.time()
        self._waiting.extend(self._open.values())
        self._open.clear()

    # --- the calls on it ----------------------------------------------------------------------

    def _queue(self, call: Call) -> None:
        if not call.ended:
            self._waiting.append(call)
            self._wanted.set()
            self._open_waiting()

    def _open_waiting(self) -> None:
        while self._outgoing and self._waiting and len(self._open) < MOST_OPEN:
            call = self._waiting.popleft()
            if not call.ended:
                self._open_one(call, str(next(self._ids)))

    def _open_one(self, call: Call, id: str) -> None:
        self._calls[call], self._open[id] = id, call
        if not call.refusals:
            call.held_since = self._loop.time()
        call.size = self._put({**call.opening(), "id": id})
        if call.cancel_wanted:
            self._put({"type": "cancel", "id": id})

    def _put(self, frame: dict[str, object]) -> int:
        """Send a frame; returns its size."""
        assert self._outgoing  # of a call that is open
        text = json.dumps(frame)
        self._outgoing.put_nowait(text)
        return len(text)

    def _receive(self, data: str | bytes) -> None:
        frame = json.loads(data)
        call = self._open.get(frame.get("id", ""))
        if frame["type"] == "error":
            self._receive_error(call, error_of(frame))
        elif call:
            call.receive(frame, len(data))
            if call.ended or call.behind:
                self._release(call)

    def _receive_error(self, call: Call | None, error: MillstreamError) -> None:
        if call:
            self._release(call)
            if not self._tries_again(call, error):
                self._fail(call, error)
        elif isinstance(error, PayloadTooLarge):
            self._fail_largest(error)

    def _release(self, call: Call) -> None:
        """Its id is free; what still comes under it is passed over."""
        if id := self._calls[call]:
            del self._open[id]
        if call.ended:
            del self._calls[call]
        else:
            self._calls[call] = None
        self._open_waiting()

    def _fail(self, call: Call, error: MillstreamError) -> None:
        call.fail(error)
        if call in self._calls:
            self._release(call)

    def _fail_all(self, calls: Iterable[Call], error: MillstreamError) -> None:
        for call in calls:
            self._fail(call, error)

    def _fail_largest(self, error: PayloadTooLarge) -> None:
        """What was not read is told of without its id; then the largest is too large as well."""
        new = [call for call in self._open.values() if not call.accepted]
        if new:
            self._fail(max(new, key=lambda call: call.size), error)

    # --- trying again -------------------------------------------------------------------------

    def _tries_again(self, call: Call, error: MillstreamError) -> bool:
        """True if the error is not the end of the call."""
        if isinstance(error, RequestNotFound) and call.accepted and not call.cancel_wanted:
            call.unaccept()
            self._queue(call)
            return True
        if error.retry_after is None:
            return False
        return self._waits_out(call, error.retry_after)

    def _waits_out(self, call: Call, retry_after: float) -> bool:
        call.refusals += 1
        wait = self._wait(call, retry_after)
        if self._loop.time() + wait - call.held_since > self._patience:
            return False
        if not call.accepted:
            self._budget.withdraw()
        self._loop.call_later(wait, self._queue, call)
        return True

    def _wait(self, call: Call, retry_after: float) -> float:
        """Seconds before a refused call is sent again.

        What was accepted is no load that could be spared: the budget is for the others.
        """
        wait = retry_after + self._backoff.seconds(call.refusals)
        return wait if call.accepted else max(wait, self._budget.wait(self._loop.time()))


async def _ping(socket: ClientConnection) -> None:
    try:
        await (await socket.ping())
    except ConnectionClosed:
        pass

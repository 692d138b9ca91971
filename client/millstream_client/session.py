"""The socket that all requests of a client share, opened anew as often as it takes.

A call that is under way waits to be opened, or is open under an id of the socket's, or it rests: it
was refused and is to be sent again later, or its reader has enough to take. When the socket drops,
what was open waits again; on the next one it is resumed, or sent again under its idempotency key
if it was never accepted.

A call whose reader leaves has its place taken by a `Parting`, which is kept like any other until a
gateway has told of the end: so that end comes even where the cancel was lost with its socket.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterable
from itertools import count

from millstream_client.backoff import Backoff
from millstream_client.budget import RetryBudget
from millstream_client.call import Call, Parting
from millstream_client.dialer import Dialer
from millstream_client.errors import (
    BadRequest,
    BrokerUnavailable,
    Cancelled,
    MillstreamError,
    NotConnected,
    PayloadTooLarge,
    RequestNotFound,
    error_of,
)
from millstream_client.line import Line

log = logging.getLogger(__name__)

MOST_OPEN = 1000  # the gateway takes 1024 of one socket
FAREWELL_SECONDS = 1.0  # so long a closed client looks for a gateway to tell of what was left


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
        self._calls: dict[Call, str | None] = {}  # those under way, each with its id on this socket
        self._open: dict[str, Call] = {}
        self._waiting: deque[Call] = deque()
        self._ids = count(1)
        self._line: Line | None = None
        self._next: Line | None = None  # the one to go over to
        self._moving: asyncio.Task[None] | None = None  # while the next one is dialled
        self._wanted = asyncio.Event()
        self._closed = False
        self._running = asyncio.create_task(self._run(), name="millstream-client")

    @property
    def gateway(self) -> str | None:
        """The URL of the socket, while there is one."""
        return self._line.url if self._line else None

    def submit(self, call: Call) -> None:
        """Take a call under way; it tells of all that follows by `changed`."""
        if self._closed:
            raise NotConnected("this client is closed")
        self._budget.deposit()
        self._calls[call] = None
        call.held_since = self._loop.time()
        self._queue(call)

    def cancel(self, call: Call) -> None:
        """Ask for its end, which comes as a `done` frame. Idempotent."""
        if call in self._calls and not call.cancel_wanted:
            id = self._calls[call]
            if call.behind:  # it is opened anew by who reads it, and that may be never
                self._calls[call] = None
                self._part(Parting(call), id)
            elif id:
                self._put({"type": "cancel", "id": id})
        call.cancel_wanted = True

    def let_go(self, call: Call) -> None:
        """Its reader has left: end it, whatever state it is in, and hear no more. Idempotent."""
        if call in self._calls and not call.left:
            id = self._calls[call]
            self._fail(call, Cancelled("it was left by its reader"))
            if call.may_run:
                self._part(Parting(call), id)

    def catch_up(self, call: Call) -> None:
        """A call that was behind has been read to the end of what had come."""
        call.behind = False
        self._queue(call)

    async def close(self) -> None:
        """Cancel all calls and part from the gateway. Idempotent.

        Between two sockets the next is opened to cancel them there, if that takes no longer than
        `FAREWELL_SECONDS`.
        """
        self._closed = True
        for call in [*self._calls]:
            self.let_go(call)
        if self._line:
            self._line.end()
        elif not self._has_waiting():
            self._running.cancel()
        try:
            await asyncio.wait({self._running}, timeout=None if self._line else FAREWELL_SECONDS)
        finally:
            self._running.cancel()
        await asyncio.wait({self._running})

    async def _run(self) -> None:
        """Keep a socket open as long as anybody wants one."""
        try:
            while not self._closed or self._has_waiting():
                if line := await self._next_line():
                    await self._serve(line)
                elif not self._closed:
                    await self._wanted.wait()
        finally:
            self._closed = True
            self._fail_all([*self._calls], NotConnected("this client is closed"))
            if self._moving:
                self._moving.cancel()
            if self._next:
                self._next.abort()

    async def _next_line(self) -> Line | None:
        """The next socket; None when nobody wants one."""
        if self._moving:
            await asyncio.wait({self._moving})
        line, self._next = self._next, None
        return line or await self._dialled()

    async def _dialled(self) -> Line | None:
        while self._has_waiting():
            await asyncio.sleep(self._dialer.pause())
            try:
                return await self._dialer.dial()
            except BadRequest as error:
                self._fail_all([*self._waiting], error)
            except MillstreamError as error:
                log.info("not connected: %s", error.message)
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
        reason = f"no gateway within {self._patience:g} s: {error.message}"
        self._fail_all(late, NotConnected(reason))

    async def _serve(self, line: Line) -> None:
        """Use a socket until it is lost or closed."""
        self._line = line
        self._open_waiting()
        if self._closed:
            line.end()
        try:
            await line.run(self._receive)
        finally:
            self._line = None
            self._lost(line)

    def _lost(self, line: Line) -> None:
        if line.was_too_big:
            self._fail_largest(PayloadTooLarge("the gateway does not take a frame of this size"))
        for call in self._open.values():
            call.held_since = self._loop.time()
        if self._next or not self._closed:
            self._waiting.extend(self._open.values())
        self._open.clear()
        self._calls = dict.fromkeys(self._calls)

    def _move_on(self) -> None:
        """Go over to the next gateway, if it takes us: what runs here is resumed there."""
        if self._moving is None and self._next is None:
            self._moving = asyncio.create_task(self._dial_next(), name="millstream-move")

    async def _dial_next(self) -> None:
        try:
            self._next = await self._dialer.dial()
        except MillstreamError as error:
            log.info("not moved: %s", error.message)
        finally:
            self._moving = None
        if self._next and self._line:
            self._line.end()

    def _queue(self, call: Call) -> None:
        if not call.ended:
            self._waiting.append(call)
            self._wanted.set()
            self._open_waiting()

    def _open_waiting(self) -> None:
        while self._line and self._waiting and len(self._open) < MOST_OPEN:
            call = self._waiting.popleft()
            if not call.ended:
                self._open_one(call, str(next(self._ids)))

    def _open_one(self, call: Call, id: str) -> None:
        self._calls[call], self._open[id] = id, call
        if not call.refusals:
            call.held_since = self._loop.time()
        call.size, call.sent = self._put({**call.opening(), "id": id}), True
        if call.cancel_wanted:
            self._put({"type": "cancel", "id": id})

    def _put(self, frame: dict[str, object]) -> int:
        """Send a frame; returns its size."""
        assert self._line  # of a call that is open
        text = json.dumps(frame)
        self._line.put(text)
        return len(text)

    def _receive(self, data: str | bytes) -> None:
        frame = json.loads(data)
        call = self._open.get(frame.get("id", ""))
        if frame["type"] == "error":
            self._receive_error(call, error_of(frame))
        elif frame["type"] == "draining":
            self._receive_draining()
        elif call:
            call.receive(frame, len(data))
            if call.ended:
                self._release(call)
            elif call.behind:
                self._set_aside(call)
        self._dialer.works()

    def _receive_draining(self) -> None:
        assert self._line  # it came from there
        self._line.draining = True
        self._move_on()

    def _receive_error(self, call: Call | None, error: MillstreamError) -> None:
        if call:
            self._release(call)
            call.sent = False
            if not self._tries_again(call, error):
                self._fail(call, error)
        elif isinstance(error, PayloadTooLarge):
            self._fail_largest(error)

    def _release(self, call: Call) -> None:
        """Its id is free; what still comes under it is passed over."""
        if id := self._calls[call]:
            self._open.pop(id, None)
        if call.ended:
            del self._calls[call]
        else:
            self._calls[call] = None
        self._open_waiting()

    def _set_aside(self, call: Call) -> None:
        """What still comes is passed over; it can be cancelled under its id, which it keeps."""
        id = self._calls[call]
        assert id  # something came under it
        del self._open[id]
        self._open_waiting()

    def _part(self, parting: Parting, id: str | None) -> None:
        """End a request at the gateway that has it open under `id`, else at the next one."""
        self._calls[parting] = id
        parting.held_since = self._loop.time()
        if id:
            self._open[id] = parting
            self._put({"type": "cancel", "id": id})
        else:
            self._queue(parting)

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

    def _tries_again(self, call: Call, error: MillstreamError) -> bool:
        """True if the error is not the end of the call."""
        if call.left and not call.accepted:
            return False  # nobody has it
        if isinstance(error, RequestNotFound) and call.accepted and not call.cancel_wanted:
            call.unaccept()
            self._queue(call)
            return True
        if error.retry_after is None or not self._rests(call, error.retry_after):
            return False
        if self._is_better_elsewhere(error):
            self._move_on()
        return True

    def _rests(self, call: Call, retry_after: float) -> bool:
        """Send a refused call again later, unless that would try its caller's patience."""
        now = self._loop.time()
        call.refusals += 1
        wait = retry_after + self._backoff.seconds(call.refusals)
        if not call.accepted:  # what was accepted is no load that could be spared
            wait = max(wait, self._budget.wait(now))
        if now + wait - call.held_since > self._patience:
            return False
        if not call.accepted:
            self._budget.withdraw()
        self._loop.call_later(wait, self._queue, call)
        return True

    def _is_better_elsewhere(self, error: MillstreamError) -> bool:
        """Whether a refusal is about the gateway: it drains, or has lost its broker."""
        assert self._line  # it came from there
        alone = len(self._dialer) == 1
        return self._line.draining or (isinstance(error, BrokerUnavailable) and not alone)

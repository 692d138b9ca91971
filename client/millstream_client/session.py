"""The socket that all requests of a client share, opened anew as often as it takes.

A call that is under way waits to be opened, or is open under an id of the socket's, or it rests: it
was refused and is to be sent again later, or its reader has enough to take. When the socket drops,
what was open waits again; on the next one it is resumed, or sent again under its idempotency key
if it was never accepted.

A call whose reader leaves has its place taken by a `AbandonedRequest`, which is kept like any other until a
gateway has told of the end: so that end comes even where the cancel was lost with its socket.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterable
from itertools import count

from millstream_client.backoff import Backoff
from millstream_client.connection import Connection
from millstream_client.connector import Connector
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
from millstream_client.request_state import AbandonedRequest, RequestState
from millstream_client.retry_budget import RetryBudget

log = logging.getLogger(__name__)

MAX_OPEN_REQUESTS = 1000  # the gateway takes 1024 of one socket
CLOSE_SECONDS = 1.0  # so long a closed client looks for a gateway to tell of what was left


class Session:
    """All calls of one client, from its making to `close`.

    `patience` is how long, in seconds, a call may be held up by gateways that refuse it or cannot
    be reached.
    """

    def __init__(self, dialer: Connector, patience: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._connector, self._patience = dialer, patience
        self._retry_budget = RetryBudget(self._loop.time())
        self._backoff = Backoff(initial=0.25, maximum=8.0)
        self._requests: dict[
            RequestState, str | None
        ] = {}  # those under way, each with its id on this socket
        self._open_by_id: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._ids = count(1)
        self._connection: Connection | None = None
        self._next_connection: Connection | None = None  # the one to go over to
        self._switching: asyncio.Task[None] | None = None  # while the next one is dialled
        self._connection_wanted = asyncio.Event()
        self._closed = False
        self._running = asyncio.create_task(self._run(), name="millstream-client")

    @property
    def gateway(self) -> str | None:
        """The URL of the socket, while there is one."""
        return self._connection.url if self._connection else None

    def submit(self, call: RequestState) -> None:
        """Take a call under way; it tells of all that follows by `changed`."""
        if self._closed:
            raise NotConnected("this client is closed")
        self._retry_budget.deposit()
        self._requests[call] = None
        call.waiting_since = self._loop.time()
        self._enqueue(call)

    def cancel(self, call: RequestState) -> None:
        """Ask for its end, which comes as a `done` frame. Idempotent."""
        if call in self._requests and not call.cancel_requested:
            id = self._requests[call]
            if call.is_behind:  # it is opened anew by who reads it, and that may be never
                self._requests[call] = None
                self._cancel_abandoned(AbandonedRequest(call), id)
            elif id:
                self._send({"type": "cancel", "id": id})
        call.cancel_requested = True

    def abandon(self, call: RequestState) -> None:
        """Its reader has left: end it, whatever state it is in, and hear no more. Idempotent."""
        if call in self._requests and not call.is_abandoned:
            id = self._requests[call]
            self._fail(call, Cancelled("it was left by its reader"))
            if call.may_run:
                self._cancel_abandoned(AbandonedRequest(call), id)

    def resume(self, call: RequestState) -> None:
        """A call that was behind has been read to the end of what had come."""
        call.is_behind = False
        self._enqueue(call)

    async def close(self) -> None:
        """Cancel all calls and part from the gateway. Idempotent.

        Between two sockets the next is opened to cancel them there, if that takes no longer than
        `FAREWELL_SECONDS`.
        """
        self._closed = True
        for call in [*self._requests]:
            self.abandon(call)
        if self._connection:
            self._connection.close()
        elif not self._has_waiting():
            self._running.cancel()
        try:
            await asyncio.wait({self._running}, timeout=None if self._connection else CLOSE_SECONDS)
        finally:
            self._running.cancel()
        await asyncio.wait({self._running})

    async def _run(self) -> None:
        """Keep a socket open as long as anybody wants one."""
        try:
            while not self._closed or self._has_waiting():
                if line := await self._wait_for_connection():
                    await self._serve(line)
                elif not self._closed:
                    await self._connection_wanted.wait()
        finally:
            self._closed = True
            self._fail_all([*self._requests], NotConnected("this client is closed"))
            if self._switching:
                self._switching.cancel()
            if self._next_connection:
                self._next_connection.abort()

    async def _wait_for_connection(self) -> Connection | None:
        """The next socket; None when nobody wants one."""
        if self._switching:
            await asyncio.wait({self._switching})
        line, self._next_connection = self._next_connection, None
        return line or await self._connect_when_wanted()

    async def _connect_when_wanted(self) -> Connection | None:
        while self._has_waiting():
            await asyncio.sleep(self._connector.delay())
            try:
                return await self._connector.connect_next()
            except BadRequest as error:
                self._fail_all([*self._waiting], error)
            except MillstreamError as error:
                log.info("not connected: %s", error.message)
                self._fail_overdue(error)
        self._connection_wanted.clear()
        return None

    def _has_waiting(self) -> bool:
        self._waiting = deque(call for call in self._waiting if not call.is_ended)
        return bool(self._waiting)

    def _fail_overdue(self, error: MillstreamError) -> None:
        """End what has waited for a gateway for too long."""
        since = self._loop.time() - self._patience
        late = [call for call in self._waiting if call.waiting_since <= since]
        reason = f"no gateway within {self._patience:g} s: {error.message}"
        self._fail_all(late, NotConnected(reason))

    async def _serve(self, line: Connection) -> None:
        """Use a socket until it is lost or closed."""
        self._connection = line
        self._open_waiting()
        if self._closed:
            line.close()
        try:
            await line.run(self._receive)
        finally:
            self._connection = None
            self._on_connection_lost(line)

    def _on_connection_lost(self, line: Connection) -> None:
        if line.was_frame_too_big:
            self._fail_largest(PayloadTooLarge("the gateway does not take a frame of this size"))
        for call in self._open_by_id.values():
            call.waiting_since = self._loop.time()
        if self._next_connection or not self._closed:
            self._waiting.extend(self._open_by_id.values())
        self._open_by_id.clear()
        self._requests = dict.fromkeys(self._requests)

    def _switch_gateway(self) -> None:
        """Go over to the next gateway, if it takes us: what runs here is resumed there."""
        if self._switching is None and self._next_connection is None:
            self._switching = asyncio.create_task(self._connect_next(), name="millstream-move")

    async def _connect_next(self) -> None:
        try:
            self._next_connection = await self._connector.connect_next()
        except MillstreamError as error:
            log.info("not moved: %s", error.message)
        finally:
            self._switching = None
        if self._next_connection and self._connection:
            self._connection.close()

    def _enqueue(self, call: RequestState) -> None:
        if not call.is_ended:
            self._waiting.append(call)
            self._connection_wanted.set()
            self._open_waiting()

    def _open_waiting(self) -> None:
        while self._connection and self._waiting and len(self._open_by_id) < MAX_OPEN_REQUESTS:
            call = self._waiting.popleft()
            if not call.is_ended:
                self._open_request(call, str(next(self._ids)))

    def _open_request(self, call: RequestState, id: str) -> None:
        self._requests[call], self._open_by_id[id] = id, call
        if not call.refusals:
            call.waiting_since = self._loop.time()
        call.opening_bytes, call.is_sent = self._send({**call.make_opening_frame(), "id": id}), True
        if call.cancel_requested:
            self._send({"type": "cancel", "id": id})

    def _send(self, frame: dict[str, object]) -> int:
        """Send a frame; returns its size."""
        assert self._connection  # of a call that is open
        text = json.dumps(frame)
        self._connection.send(text)
        return len(text)

    def _receive(self, data: str | bytes) -> None:
        frame = json.loads(data)
        call = self._open_by_id.get(frame.get("id", ""))
        if frame["type"] == "error":
            self._receive_error(call, error_of(frame))
        elif frame["type"] == "draining":
            self._receive_draining()
        elif call:
            call.receive(frame, len(data))
            if call.is_ended:
                self._free_id(call)
            elif call.is_behind:
                self._stop_receiving(call)
        self._connector.mark_working()

    def _receive_draining(self) -> None:
        assert self._connection  # it came from there
        self._connection.is_draining = True
        self._switch_gateway()

    def _receive_error(self, call: RequestState | None, error: MillstreamError) -> None:
        if call:
            self._free_id(call)
            call.is_sent = False
            if not self._recovers_from(call, error):
                self._fail(call, error)
        elif isinstance(error, PayloadTooLarge):
            self._fail_largest(error)

    def _free_id(self, call: RequestState) -> None:
        """Its id is free; what still comes under it is passed over."""
        if id := self._requests[call]:
            self._open_by_id.pop(id, None)
        if call.is_ended:
            del self._requests[call]
        else:
            self._requests[call] = None
        self._open_waiting()

    def _stop_receiving(self, call: RequestState) -> None:
        """What still comes is passed over; it can be cancelled under its id, which it keeps."""
        id = self._requests[call]
        assert id  # something came under it
        del self._open_by_id[id]
        self._open_waiting()

    def _cancel_abandoned(self, parting: AbandonedRequest, id: str | None) -> None:
        """End a request at the gateway that has it open under `id`, else at the next one."""
        self._requests[parting] = id
        parting.waiting_since = self._loop.time()
        if id:
            self._open_by_id[id] = parting
            self._send({"type": "cancel", "id": id})
        else:
            self._enqueue(parting)

    def _fail(self, call: RequestState, error: MillstreamError) -> None:
        call.fail(error)
        if call in self._requests:
            self._free_id(call)

    def _fail_all(self, calls: Iterable[RequestState], error: MillstreamError) -> None:
        for call in calls:
            self._fail(call, error)

    def _fail_largest(self, error: PayloadTooLarge) -> None:
        """What was not read is told of without its id; then the largest is too large as well."""
        new = [call for call in self._open_by_id.values() if not call.is_accepted]
        if new:
            self._fail(max(new, key=lambda call: call.opening_bytes), error)

    def _recovers_from(self, call: RequestState, error: MillstreamError) -> bool:
        """True if the error is not the end of the call."""
        if call.is_abandoned and not call.is_accepted:
            return False  # nobody has it
        if isinstance(error, RequestNotFound) and call.is_accepted and not call.cancel_requested:
            call.reset_acceptance()
            self._enqueue(call)
            return True
        if error.retry_after is None or not self._schedule_retry(call, error.retry_after):
            return False
        if self._should_switch_gateway(error):
            self._switch_gateway()
        return True

    def _schedule_retry(self, call: RequestState, retry_after: float) -> bool:
        """Send a refused call again later, unless that would try its caller's patience."""
        now = self._loop.time()
        call.refusals += 1
        wait = retry_after + self._backoff.delay(call.refusals)
        if not call.is_accepted:  # what was accepted is no load that could be spared
            wait = max(wait, self._retry_budget.delay(now))
        if now + wait - call.waiting_since > self._patience:
            return False
        if not call.is_accepted:
            self._retry_budget.withdraw()
        self._loop.call_later(wait, self._enqueue, call)
        return True

    def _should_switch_gateway(self, error: MillstreamError) -> bool:
        """Whether a refusal is about the gateway: it drains, or has lost its broker."""
        assert self._connection  # it came from there
        alone = len(self._connector) == 1
        return self._connection.is_draining or (isinstance(error, BrokerUnavailable) and not alone)

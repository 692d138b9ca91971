"""All requests of a client over one connection, which is replaced by another when it is lost.

A request that has not ended waits to be opened, is open under an id of the connection, or is
paused: it was refused and will be sent again later, or its reader has enough buffered. When the
connection is lost, open requests wait again; on the next connection they are resumed, or sent again
with their idempotency key if they were never accepted.

A request whose reader leaves is replaced by an `AbandonedRequest`, which is kept like any other
until a gateway has reported its end: so it ends even if the cancel frame was lost with its
connection.
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

MAX_OPEN_REQUESTS = 1000  # a gateway accepts 1024 on one connection
CLOSE_SECONDS = 1.0  # how long a closing client tries to reach a gateway to cancel its requests


class Session:
    """All requests of one client, and the one connection that they share.

    The constructor needs a running event loop, and starts a task that connects when there is a
    request, and again when the connection is lost, until `close`. `patience` is how many seconds a
    request may be delayed by gateways that refuse it or cannot be reached, before it fails.
    """

    def __init__(self, connector: Connector, patience: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._connector, self._patience = connector, patience
        self._retry_budget = RetryBudget(self._loop.time())
        self._backoff = Backoff(initial=0.25, maximum=8.0)
        # The requests that have not ended, each with its id on the current connection
        self._requests: dict[RequestState, str | None] = {}
        self._open_by_id: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._ids = count(1)
        self._connection: Connection | None = None
        self._next_connection: Connection | None = None  # opened to replace the current one
        self._switching: asyncio.Task[None] | None = None  # while that one is being opened
        self._connection_wanted = asyncio.Event()
        self._closed = False
        self._running = asyncio.create_task(self._run(), name="millstream-client")

    @property
    def gateway(self) -> str | None:
        """The WebSocket URL of the gateway that is connected now; None without a connection."""
        return self._connection.url if self._connection else None

    def submit(self, request: RequestState) -> None:
        """Take a new request, to be sent as soon as there is a connection; returns at once.

        Received frames and errors are written to `request`, whose `on_change` is then called. A
        failure of the request is not raised here. Raises `NotConnected` if the session is closed.
        """
        if self._closed:
            raise NotConnected("this client is closed")
        self._retry_budget.deposit()
        self._requests[request] = None
        request.waiting_since = self._loop.time()
        self._enqueue(request)

    def cancel(self, request: RequestState) -> None:
        """Ask the gateway to end the request; returns at once. Idempotent.

        Unless it ends otherwise before, it ends as `Done` with the finish reason `cancelled`. A
        request that waits for a connection is cancelled once it is sent.
        """
        if request in self._requests and not request.cancel_requested:
            id = self._requests[request]
            if request.is_behind:  # only its reader resumes it, which may never happen
                self._requests[request] = None
                self._cancel_abandoned(AbandonedRequest(request), id)
            elif id:
                self._send({"type": "cancel", "id": id})
        request.cancel_requested = True

    def abandon(self, request: RequestState) -> None:
        """End a request whose reader has left, whether or not it was sent; returns at once.

        The outcome of `request` becomes `Cancelled`. The gateway is told to cancel the request, at
        the next connection if there is none now. Idempotent; a request that has ended or was never
        submitted is not changed.
        """
        if request in self._requests and not request.is_abandoned:
            id = self._requests[request]
            self._fail(request, Cancelled("it was left by its reader"))
            if request.may_run:
                self._cancel_abandoned(AbandonedRequest(request), id)

    def resume(self, request: RequestState) -> None:
        """Ask the gateway for the rest of the answer to a request that `is_behind`.

        Returns at once; the request then receives frames again. To be called when the reader has
        read everything that was buffered.
        """
        request.is_behind = False
        self._enqueue(request)

    async def close(self) -> None:
        """Cancel all requests, and return when the connection is closed. Idempotent.

        The requests end as `Cancelled`, and `submit` raises `NotConnected` from now on. If requests
        may run at a gateway and there is no connection at present, waits up to 1 s
        (`CLOSE_SECONDS`) for a new one over which to cancel them.
        """
        self._closed = True
        for request in [*self._requests]:
            self.abandon(request)
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
        """Keep a connection while requests need one; when the session ends, fail all requests."""
        try:
            while not self._closed or self._has_waiting():
                if connection := await self._wait_for_connection():
                    await self._serve(connection)
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
        """The next connection; None when no request waits for one."""
        if self._switching:
            await asyncio.wait({self._switching})
        connection, self._next_connection = self._next_connection, None
        return connection or await self._connect_when_wanted()

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
        self._waiting = deque(request for request in self._waiting if not request.is_ended)
        return bool(self._waiting)

    def _fail_overdue(self, error: MillstreamError) -> None:
        """Fail the requests that have waited for a gateway for longer than the patience."""
        limit = self._loop.time() - self._patience
        overdue = [request for request in self._waiting if request.waiting_since <= limit]
        reason = f"no gateway within {self._patience:g} s: {error.message}"
        self._fail_all(overdue, NotConnected(reason))

    async def _serve(self, connection: Connection) -> None:
        """Use a connection until it is lost or closed."""
        self._connection = connection
        self._open_waiting()
        if self._closed:
            connection.close()
        try:
            await connection.run(self._receive)
        finally:
            self._connection = None
            self._on_connection_lost(connection)

    def _on_connection_lost(self, connection: Connection) -> None:
        if connection.was_frame_too_big:
            self._fail_largest(PayloadTooLarge("the gateway does not take a frame of this size"))
        if refusal := connection.refusal:
            self._fail_all([*self._requests], refusal)
        for request in self._open_by_id.values():
            request.waiting_since = self._loop.time()
        if self._next_connection or not self._closed:
            self._waiting.extend(self._open_by_id.values())
        self._open_by_id.clear()
        self._requests = dict.fromkeys(self._requests)

    def _switch_gateway(self) -> None:
        """Connect to the next gateway; if that succeeds, requests are resumed there."""
        if self._switching is None and self._next_connection is None:
            self._switching = asyncio.create_task(self._connect_next(), name="millstream-switch")

    async def _connect_next(self) -> None:
        try:
            self._next_connection = await self._connector.connect_next()
        except MillstreamError as error:
            log.info("not switched: %s", error.message)
        finally:
            self._switching = None
        if self._next_connection and self._connection:
            self._connection.close()

    def _enqueue(self, request: RequestState) -> None:
        if not request.is_ended:
            self._waiting.append(request)
            self._connection_wanted.set()
            self._open_waiting()

    def _open_waiting(self) -> None:
        while self._connection and self._waiting and len(self._open_by_id) < MAX_OPEN_REQUESTS:
            request = self._waiting.popleft()
            if not request.is_ended:
                self._open_request(request, str(next(self._ids)))

    def _open_request(self, request: RequestState, id: str) -> None:
        self._requests[request], self._open_by_id[id] = id, request
        if not request.refusals:
            request.waiting_since = self._loop.time()
        request.opening_bytes = self._send({**request.make_opening_frame(), "id": id})
        request.is_sent = True
        if request.cancel_requested:
            self._send({"type": "cancel", "id": id})

    def _send(self, frame: dict[str, object]) -> int:
        """Send a frame; return its number of characters."""
        assert self._connection  # only called while there is one
        text = json.dumps(frame)
        self._connection.send(text)
        return len(text)

    def _receive(self, data: str | bytes) -> None:
        frame = json.loads(data)
        request = self._open_by_id.get(frame.get("id", ""))
        if frame["type"] == "error":
            self._receive_error(request, error_of(frame))
        elif frame["type"] == "draining":
            self._receive_draining()
        elif request:
            request.receive(frame, len(data))
            if request.is_ended:
                self._free_id(request)
            elif request.is_behind:
                self._stop_receiving(request)
        self._connector.mark_working()

    def _receive_draining(self) -> None:
        assert self._connection  # the frame came over it
        self._connection.is_draining = True
        self._switch_gateway()

    def _receive_error(self, request: RequestState | None, error: MillstreamError) -> None:
        if request:
            self._free_id(request)
            request.is_sent = False
            if not self._recovers_from(request, error):
                self._fail(request, error)
        elif isinstance(error, PayloadTooLarge):
            self._fail_largest(error)

    def _free_id(self, request: RequestState) -> None:
        """Release the request's id; frames that still come with it are ignored."""
        if id := self._requests[request]:
            self._open_by_id.pop(id, None)
        if request.is_ended:
            del self._requests[request]
        else:
            self._requests[request] = None
        self._open_waiting()

    def _stop_receiving(self, request: RequestState) -> None:
        """Ignore further frames of a request; it keeps its id, so that it can be cancelled."""
        id = self._requests[request]
        assert id  # a frame came with it
        del self._open_by_id[id]
        self._open_waiting()

    def _cancel_abandoned(self, abandoned: AbandonedRequest, id: str | None) -> None:
        """Cancel a request on this connection if it is open under `id`, else on the next one."""
        self._requests[abandoned] = id
        abandoned.waiting_since = self._loop.time()
        if id:
            self._open_by_id[id] = abandoned
            self._send({"type": "cancel", "id": id})
        else:
            self._enqueue(abandoned)

    def _fail(self, request: RequestState, error: MillstreamError) -> None:
        request.fail(error)
        if request in self._requests:
            self._free_id(request)

    def _fail_all(self, requests: Iterable[RequestState], error: MillstreamError) -> None:
        for request in requests:
            self._fail(request, error)

    def _fail_largest(self, error: PayloadTooLarge) -> None:
        """Fail the largest request that is not accepted.

        A gateway that does not read a frame cannot tell the request's id; if one frame was too
        large, the largest was.
        """
        new = [request for request in self._open_by_id.values() if not request.is_accepted]
        if new:
            self._fail(max(new, key=lambda request: request.opening_bytes), error)

    def _recovers_from(self, request: RequestState, error: MillstreamError) -> bool:
        """Handle an error that does not end the request; return False if it does."""
        if request.is_abandoned and not request.is_accepted:
            return False  # the gateway refused it, so nothing is left to cancel
        if (
            isinstance(error, RequestNotFound)
            and request.is_accepted
            and not request.cancel_requested
        ):
            request.reset_acceptance()
            self._enqueue(request)
            return True
        if error.retry_after is None or not self._schedule_retry(request, error.retry_after):
            return False
        if self._should_switch_gateway(error):
            self._switch_gateway()
        return True

    def _schedule_retry(self, request: RequestState, retry_after: float) -> bool:
        """Schedule a refused request to be sent again; False if that exceeds the patience."""
        now = self._loop.time()
        request.refusals += 1
        wait = retry_after + self._backoff.delay(request.refusals)
        if not request.is_accepted:  # resuming an accepted request is not limited by the budget
            wait = max(wait, self._retry_budget.delay(now))
        if now + wait - request.waiting_since > self._patience:
            return False
        if not request.is_accepted:
            self._retry_budget.withdraw()
        self._loop.call_later(wait, self._enqueue, request)
        return True

    def _should_switch_gateway(self, error: MillstreamError) -> bool:
        """True if another gateway may accept: this one drains, or has lost its broker."""
        assert self._connection  # the refusal came over it
        is_only = len(self._connector) == 1
        return self._connection.is_draining or (
            isinstance(error, BrokerUnavailable) and not is_only
        )

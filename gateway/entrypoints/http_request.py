"""One HTTP request for inference: submitted, followed, and let go when its client leaves.

It may ask for several answers (`n`, or several prompts). Each of these choices is a durable request
of its own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request

from api.schemas.websocket_frames import MAX_IDEMPOTENCY_KEY
from api.submission.submission import Submission
from api.submission.validation import ValidatedRequest
from gateway.admission.submitter import Ticket
from gateway.context import GatewayContext
from gateway.metrics import RequestMetrics, count_refused
from gateway.replies.log_subscription import Sink
from gateway.replies.record_queue import ClientGone, RecordQueue
from registry.tenant_records import Tenant
from streams.errors import BadRequest, Ended, MillstreamError
from streams.messages import Record

IDEMPOTENCY_HEADER = "idempotency-key"
FIRST_RECORD_SECONDS = 5.0  # so long a stream's headers wait, to carry the status of an early error


class HttpRequest:
    """The records of submitted requests; `next` raises `Ended` for an error, or `ClientGone`.

    Each record says under `choice` of which request it is. The requests are independent, so their
    records are interleaved as they come.
    """

    def __init__(
        self, tickets: Sequence[Ticket], reader: RecordQueue, watches: Sequence[RequestMetrics]
    ) -> None:
        self.tickets = tickets
        self._records, self._metrics = reader, watches
        self._open_count = len(tickets)
        self._first_record: Record | None = None
        self._failure: Ended | None = None

    @property
    def ticket(self) -> Ticket:
        """That of the first request, whose id is the answer's."""
        return self.tickets[0]

    @property
    def is_ended(self) -> bool:
        """True once the last record of every request has been seen."""
        return not self._open_count

    async def next(self) -> Record:
        if self._failure:
            raise self._failure
        first, self._first_record = self._first_record, None
        return first if first is not None else self._observe(await self._records.next())

    def next_ready(self) -> list[Record]:
        """What is here already behind the last `next`; an error among it is left for the next."""
        found = []
        try:
            while record := self._records.next_nowait():
                found.append(self._observe(record))
        except Ended as failure:
            self._failure = failure
        return found

    async def await_first_record(self) -> None:
        """Wait a little for the first record, so that what fails at once fails with its status."""
        try:
            async with asyncio.timeout(FIRST_RECORD_SECONDS):
                self._first_record = await self.next()
        except TimeoutError:
            pass  # it is queued: the stream begins without it

    def _observe(self, record: Record) -> Record:
        self._metrics[record["choice"]].observe(record)
        if record["type"] == "error":
            raise Ended(record["code"], record["message"])
        if record["type"] == "done":
            self._open_count -= 1
            if record["finish_reason"] == "cancelled":
                raise Ended("cancelled", "the request was cancelled")
        return record


@asynccontextmanager
async def submit_http_request(
    door: GatewayContext, request: Request, tenant: Tenant, *submissions: Submission
) -> AsyncIterator[HttpRequest]:
    """Submit, and give the requests up at the end: all of them, or none if one is refused.

    A request with an idempotency key can be asked for again, so it gets the grace period; any other
    is cancelled as soon as nobody can get its answer any more.
    """
    arrived = time.perf_counter()
    tickets: list[Ticket] = []
    reader = RecordQueue(lambda: _unpause(door, tickets))
    door.record_queues.add(reader)
    try:
        door.check_not_draining()
        key = _idempotency_key(request)
        prepare = door.submitter.validator.validate
        prepared = [each for s in submissions for each in await prepare(tenant, s)]
        tickets += await _submit_all(door, prepared, reader, key)
    except MillstreamError as error:
        count_refused(tenant.name, error.code)
        raise
    _unpause(door, tickets)
    priority = submissions[0].priority
    watches = [RequestMetrics(tenant.name, each.model.name, priority, arrived) for each in tickets]
    leaving = asyncio.create_task(_watch_client(request, reader), name="client")
    try:
        yield HttpRequest(tickets, reader, watches)
    finally:
        leaving.cancel()
        _release(door, tickets, cancel=key is None)


async def _submit_all(
    door: GatewayContext, prepared: Sequence[ValidatedRequest], reader: RecordQueue, key: str | None
) -> list[Ticket]:
    """Queue all, side by side. If one is refused the others are let go, and the refusal raised."""
    accepted: dict[int, Ticket] = {}

    async def accept(choice: int, one: ValidatedRequest) -> None:
        sink, own = _choice_sink(reader, choice), _choice_key(key, choice)
        accepted[choice] = await door.submitter.submit_validated(one, sink, own)

    try:
        accepting = map(accept, range(len(prepared)), prepared)
        for failure in await asyncio.gather(*accepting, return_exceptions=True):
            if failure is not None:
                raise failure
    except BaseException:
        _release(door, accepted.values(), cancel=key is None)
        raise
    return [ticket for _, ticket in sorted(accepted.items())]


def _choice_sink(reader: RecordQueue, choice: int) -> Sink:
    """Puts records into the reader of all choices, marked with whose they are."""

    def put(record: Record, size: int) -> bool:
        record["choice"] = choice
        return reader.put(record, size)

    return put


def _idempotency_key(request: Request) -> str | None:
    """The client's idempotency key; raises `BadRequest` for one that is empty or too long."""
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
        message = (
            f"an idempotency key has 1 to {MAX_IDEMPOTENCY_KEY} characters, this one has {len(key)}"
        )
        raise BadRequest(message, "Idempotency-Key")
    return key


def _choice_key(key: str | None, choice: int) -> str | None:
    """Each choice's own; no header can hold a line break."""
    return f"{key}\n{choice}" if key is not None and choice else key


def _unpause(door: GatewayContext, tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        door.relay.unpause(ticket.subscription)


def _release(door: GatewayContext, tickets: Iterable[Ticket], *, cancel: bool) -> None:
    for ticket in tickets:
        if not ticket.subscription.is_ended:
            door.relay.orphan(ticket.subscription)
            if cancel:
                door.relay.cancel(ticket.subscription)


async def _watch_client(request: Request, reader: RecordQueue) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    reader.close(ClientGone())

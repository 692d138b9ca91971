"""One HTTP request for inference: submits it, yields its records, gives it up if its client leaves.

The request may ask for several answers (`n`, or several prompts). Each of these choices is a
durable request of its own.
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
FIRST_RECORD_SECONDS = 5.0  # a stream's headers wait so long, to have an early error's status


class HttpRequest:
    """One HTTP request's choices (the answers it asks for), each a durable request of its own.

    Yields the records of all choices as they come, interleaved. Each record has the index of its
    choice under `choice`.
    """

    def __init__(
        self, tickets: Sequence[Ticket], queue: RecordQueue, metrics: Sequence[RequestMetrics]
    ) -> None:
        self.tickets = tickets
        self._records, self._metrics = queue, metrics
        self._open_count = len(tickets)
        self._first_record: Record | None = None
        self._failure: Ended | None = None

    @property
    def ticket(self) -> Ticket:
        """The ticket of the first choice, whose request id is used for the whole response."""
        return self.tickets[0]

    @property
    def is_ended(self) -> bool:
        """True once the last record of every choice was returned."""
        return not self._open_count

    async def next(self) -> Record:
        """Wait, without limit, for the next record of any choice and return it.

        Raises `Ended` if a choice has failed or was cancelled, or this gateway shuts down, and
        `ClientGone` if the client has closed its connection.
        """
        if self._failure:
            raise self._failure
        first, self._first_record = self._first_record, None
        return first if first is not None else self._observe(await self._records.next())

    def next_ready(self) -> list[Record]:
        """Return the records that are here already, without waiting; empty if there are none.

        An error among them ends the list, and is raised by the next call of `next`.
        """
        records = []
        try:
            while record := self._records.next_nowait():
                records.append(self._observe(record))
        except Ended as failure:
            self._failure = failure
        return records

    async def await_first_record(self) -> None:
        """Wait for the first record, for at most `FIRST_RECORD_SECONDS`; `next` will return it.

        Call it before the response begins, so that an error that comes early is raised here and
        decides the HTTP status. Raises as `next` does. Returns without a record if none came in
        time.
        """
        try:
            async with asyncio.timeout(FIRST_RECORD_SECONDS):
                self._first_record = await self.next()
        except TimeoutError:
            pass  # the request is queued: the stream begins without a record

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
    context: GatewayContext, request: Request, tenant: Tenant, *submissions: Submission
) -> AsyncIterator[HttpRequest]:
    """Queue all choices of the submissions, and yield their records as an `HttpRequest`.

    All choices are accepted, or none: if one is refused, the others are given up, and its
    `BadRequest` or `Refused` is raised. When the block ends, choices that still run are given up.
    With an idempotency key the client can ask for the answer again, so they are cancelled only
    after the grace period. Without one nobody can get the answer any more, and they are cancelled
    at once.
    """
    arrived = time.perf_counter()
    tickets: list[Ticket] = []
    queue = RecordQueue(lambda: _unpause(context, tickets))
    context.record_queues.add(queue)
    try:
        context.check_not_draining()
        key = _idempotency_key(request)
        validate = context.submitter.validator.validate
        validated = [each for s in submissions for each in await validate(tenant, s)]
        tickets += await _submit_all(context, validated, queue, key)
    except MillstreamError as error:
        count_refused(tenant.name, error.code)
        raise
    _unpause(context, tickets)
    priority = submissions[0].priority
    metrics = [RequestMetrics(tenant.name, each.model.name, priority, arrived) for each in tickets]
    watching = asyncio.create_task(_watch_client(request, queue), name="client")
    try:
        yield HttpRequest(tickets, queue, metrics)
    finally:
        watching.cancel()
        _release(context, tickets, cancel=key is None)


async def _submit_all(
    context: GatewayContext,
    requests: Sequence[ValidatedRequest],
    queue: RecordQueue,
    key: str | None,
) -> list[Ticket]:
    """Queue all requests at the same time; if one is refused give up the others and raise."""
    accepted: dict[int, Ticket] = {}

    async def accept(choice: int, validated: ValidatedRequest) -> None:
        sink, choice_key = _choice_sink(queue, choice), _choice_key(key, choice)
        accepted[choice] = await context.submitter.submit_validated(validated, sink, choice_key)

    try:
        accepting = map(accept, range(len(requests)), requests)
        for failure in await asyncio.gather(*accepting, return_exceptions=True):
            if failure is not None:
                raise failure
    except BaseException:
        _release(context, accepted.values(), cancel=key is None)
        raise
    return [ticket for _, ticket in sorted(accepted.items())]


def _choice_sink(queue: RecordQueue, choice: int) -> Sink:
    """A sink that puts records into the queue of all choices, marked with their choice's index."""

    def put(record: Record, size: int) -> bool:
        record["choice"] = choice
        return queue.put(record, size)

    return put


def _idempotency_key(request: Request) -> str | None:
    """The client's idempotency key, or None; raises `BadRequest` for an empty or too long one."""
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is not None and not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY:
        message = (
            f"an idempotency key has 1 to {MAX_IDEMPOTENCY_KEY} characters, this one has {len(key)}"
        )
        raise BadRequest(message, "Idempotency-Key")
    return key


def _choice_key(key: str | None, choice: int) -> str | None:
    """The idempotency key of a choice: the client's own for the first, else with a line break.

    No header can hold a line break, so no client can send such a key.
    """
    return f"{key}\n{choice}" if key is not None and choice else key


def _unpause(context: GatewayContext, tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        context.relay.unpause(ticket.subscription)


def _release(context: GatewayContext, tickets: Iterable[Ticket], *, cancel: bool) -> None:
    for ticket in tickets:
        if not ticket.subscription.is_ended:
            context.relay.orphan(ticket.subscription)
            if cancel:
                context.relay.cancel(ticket.subscription)


async def _watch_client(request: Request, queue: RecordQueue) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    queue.close(ClientGone())

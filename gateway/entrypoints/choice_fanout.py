"""One HTTP request for inference: submits it, yields its records, gives it up if its client leaves.

The request may ask for several answers (`n`, or several prompts). Each of these choices is a
durable request of its own.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.requests import Request

from api.authentication.authenticator import Principal
from api.schemas.websocket_frames import MAX_IDEMPOTENCY_KEY
from api.submission.submission_record import Submission
from api.submission.validation import ValidatedRequest
from gateway.admission.client_requests import Ticket
from gateway.context import GatewayContext
from gateway.entrypoints.http_middleware import REQUEST_ID
from gateway.metrics import RequestMetrics
from gateway.replies.log_subscription import Sink, discard_record
from gateway.replies.record_queue import ClientGone, RecordQueue
from registry.tenant_records import Tenant
from streams.errors import BadRequest, Ended, MillstreamError
from streams.messages import Record

IDEMPOTENCY_HEADER = "idempotency-key"
FIRST_OUTPUT_SECONDS = 5.0  # a stream's headers wait so long, to have an early error's status
_BEFORE_OUTPUT = ("accepted", "started")


class ChoiceFanout:
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
        self._first_records: deque[Record] = deque()
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
        """Wait for the next record; raises `Ended` for an error, `ClientGone` if it has left."""
        if self._first_records:
            return self._first_records.popleft()
        if self._failure:
            raise self._failure
        return self._observe(await self._records.next())

    def next_ready(self) -> list[Record]:
        """Return the records that are here already; an error among them is raised by `next`."""
        records = [*self._first_records]
        self._first_records.clear()
        try:
            while record := self._records.next_nowait():
                records.append(self._observe(record))
        except Ended as failure:
            self._failure = failure
        return records

    async def await_first_output(self) -> None:
        """Wait a little for the first output, so that an error before it is raised here.

        Then the response has the error's status. After `FIRST_OUTPUT_SECONDS` this returns without
        output.
        """
        try:
            async with asyncio.timeout(FIRST_OUTPUT_SECONDS):
                while True:
                    record = self._observe(await self._records.next())
                    self._first_records.append(record)
                    if record["type"] not in _BEFORE_OUTPUT:
                        return
        except TimeoutError:
            pass  # the request is queued, or slow: the stream begins without output

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
async def submit_choices(
    context: GatewayContext,
    request: Request,
    principal: Principal,
    *submissions: Submission,
    resumes: bool = False,
    stores_result: bool = False,
) -> AsyncIterator[ChoiceFanout]:
    """Queue all choices of the submissions, and yield their records as a `ChoiceFanout`.

    If one is refused none is left running, and the refusal is raised. A request with an idempotency
    key can be asked for again, so it is given up with a grace period; any other is cancelled at
    once, since nobody can get its answer any more. So is every one whose principal ends: the
    records that wait come first, then `Ended` with the reason. With `resumes`, a request that
    its idempotency key does not lead to is refused: `RequestNotFound`. With `stores_result` whoever
    ends the request stores its result, as that of a response.
    """
    queue = RecordQueue(lambda: _unpause(context, tickets))
    tickets: list[Ticket] = []
    is_cut = asyncio.Event()

    def cut(reason: MillstreamError) -> None:
        is_cut.set()
        queue.close(Ended(reason.code, reason.message))

    arrived, tenant = time.perf_counter(), principal.tenant
    context.record_queues.add(queue)
    try:
        context.check_not_draining()
        key = parse_idempotency_key(request)
        if resumes:
            await _check_known(context, tenant, key, submissions)
        validate = context.preparation.validate
        validated = [
            replace(each, stores_result=stores_result)
            for submission in submissions
            for each in await validate(tenant, submission)
        ]
        principal.check("infer")  # it may have ended while the body came or was tokenised
        tickets += await _submit_all(context, validated, queue, key)
    except MillstreamError as error:
        first = submissions[0]
        context.refusals.count(tenant.name, error.code, first.model, first.priority)
        raise
    request.scope["state"][REQUEST_ID] = tickets[0].request_id
    _unpause(context, tickets)
    priority = submissions[0].priority
    metrics = [RequestMetrics(tenant.name, each.model.name, priority, arrived) for each in tickets]
    watching = asyncio.create_task(watch_client(request, queue), name="client")
    try:
        with context.watching(principal, "infer", cut):
            yield ChoiceFanout(tickets, queue, metrics)
    finally:
        watching.cancel()
        _release(context, tickets, metrics, cancel=key is None or is_cut.is_set())


async def _check_known(
    context: GatewayContext, tenant: Tenant, key: str | None, submissions: Sequence[Submission]
) -> None:
    """Raise unless the key leads to a request for every choice."""
    if key is None:
        raise BadRequest("a Last-Event-ID comes with the stream's Idempotency-Key", "Last-Event-ID")
    for choice in range(sum(each.choices for each in submissions)):
        choice_key = _choice_key(key, choice)
        assert choice_key
        await context.client_requests.check_key_known(tenant.name, choice_key)


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
        accepted[choice] = await context.client_requests.submit(validated, sink, choice_key)

    try:
        accepting = map(accept, range(len(requests)), requests)
        for failure in await asyncio.gather(*accepting, return_exceptions=True):
            if failure is not None:
                raise failure
    except BaseException:
        _release(context, accepted.values(), None, cancel=key is None)
        raise
    return [ticket for _, ticket in sorted(accepted.items())]


def _choice_sink(queue: RecordQueue, choice: int) -> Sink:
    """A sink that puts records into the queue of all choices, marked with their choice's index."""

    def put(record: Record, size: int) -> bool:
        record["choice"] = choice
        return queue.put(record, size)

    return put


def parse_idempotency_key(request: Request) -> str | None:
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


def _release(
    context: GatewayContext,
    tickets: Iterable[Ticket],
    metrics: Sequence[RequestMetrics] | None,
    *,
    cancel: bool,
) -> None:
    """Give up the requests that run on; the gateway that accepted one still counts its end."""
    for choice, ticket in enumerate(tickets):
        if not ticket.subscription.is_ended:
            sink: Sink = discard_record
            if metrics and ticket.is_new:
                sink = metrics[choice].observe_unread
            context.relay.orphan(ticket.subscription, sink)
            if cancel:
                context.relay.cancel(ticket.subscription)


async def watch_client(request: Request, queue: RecordQueue) -> None:
    """Close the queue of a response when its client leaves; then return."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    queue.close(ClientGone())

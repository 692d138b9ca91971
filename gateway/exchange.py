"""One HTTP request for inference: submitted, followed, and let go when its client leaves.

It may ask for several answers (`n`, or several prompts). Each of these choices is a durable request
of its own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request

from gateway.door import Door
from gateway.following import Record, Sink
from gateway.intake import Ticket
from gateway.metrics import Watch, count_refused
from gateway.preparation import Prepared
from gateway.reader import Gone, Reader
from gateway.schemas.frames import MAX_KEY
from gateway.submission import Submission
from registry.tenants import Tenant
from streams.errors import BadRequest, Ended, MillstreamError

IDEMPOTENCY_KEY = "idempotency-key"
FIRST_RECORD_SECONDS = 5.0  # so long a stream's headers wait, to carry the status of an early error


class Exchange:
    """The records of submitted requests; `next` raises `Ended` for an error, or `Gone`.

    Each record says under `choice` of which request it is. The requests are independent, so their
    records are interleaved as they come.
    """

    def __init__(self, tickets: Sequence[Ticket], reader: Reader, watches: Sequence[Watch]) -> None:
        self.tickets = tickets
        self._reader, self._watches = reader, watches
        self._open = len(tickets)
        self._first: Record | None = None
        self._failure: Ended | None = None

    @property
    def ticket(self) -> Ticket:
        """That of the first request, whose id is the answer's."""
        return self.tickets[0]

    @property
    def ended(self) -> bool:
        """True once the last record of every request has been seen."""
        return not self._open

    async def next(self) -> Record:
        if self._failure:
            raise self._failure
        first, self._first = self._first, None
        return first if first is not None else self._seen(await self._reader.next())

    def ready(self) -> list[Record]:
        """What is here already behind the last `next`; an error among it is left for the next."""
        found = []
        try:
            while record := self._reader.next_ready():
                found.append(self._seen(record))
        except Ended as failure:
            self._failure = failure
        return found

    async def begin(self) -> None:
        """Wait a little for the first record, so that what fails at once fails with its status."""
        try:
            async with asyncio.timeout(FIRST_RECORD_SECONDS):
                self._first = await self.next()
        except TimeoutError:
            pass  # it is queued: the stream begins without it

    def _seen(self, record: Record) -> Record:
        self._watches[record["choice"]].record(record)
        if record["type"] == "error":
            raise Ended(record["code"], record["message"])
        if record["type"] == "done":
            self._open -= 1
            if record["finish_reason"] == "cancelled":
                raise Ended("cancelled", "the request was cancelled")
        return record


@asynccontextmanager
async def exchange(
    door: Door, request: Request, tenant: Tenant, *submissions: Submission
) -> AsyncIterator[Exchange]:
    """Submit, and give the requests up at the end: all of them, or none if one is refused.

    A request with an idempotency key can be asked for again, so it gets the grace period; any other
    is cancelled as soon as nobody can get its answer any more.
    """
    arrived = time.perf_counter()
    tickets: list[Ticket] = []
    reader = Reader(lambda: _go_on(door, tickets))
    door.readers.add(reader)
    try:
        door.check_open()
        key = _key(request)
        prepare = door.intake.preparation.prepare
        prepared = [each for s in submissions for each in await prepare(tenant, s)]
        tickets += await _accept(door, prepared, reader, key)
    except MillstreamError as error:
        count_refused(tenant.name, error.code)
        raise
    _go_on(door, tickets)
    priority = submissions[0].priority
    watches = [Watch(tenant.name, each.model.name, priority, arrived) for each in tickets]
    leaving = asyncio.create_task(_watch_client(request, reader), name="client")
    try:
        yield Exchange(tickets, reader, watches)
    finally:
        leaving.cancel()
        _let_go(door, tickets, cancel=key is None)


async def _accept(
    door: Door, prepared: Sequence[Prepared], reader: Reader, key: str | None
) -> list[Ticket]:
    """Queue all, side by side. If one is refused the others are let go, and the refusal raised."""
    accepted: dict[int, Ticket] = {}

    async def accept(choice: int, one: Prepared) -> None:
        sink, own = _sink(reader, choice), _key_of(key, choice)
        accepted[choice] = await door.intake.accept(one, sink, own)

    try:
        accepting = map(accept, range(len(prepared)), prepared)
        for failure in await asyncio.gather(*accepting, return_exceptions=True):
            if failure is not None:
                raise failure
    except BaseException:
        _let_go(door, accepted.values(), cancel=key is None)
        raise
    return [ticket for _, ticket in sorted(accepted.items())]


def _sink(reader: Reader, choice: int) -> Sink:
    """Puts records into the reader of all choices, marked with whose they are."""

    def put(record: Record, size: int) -> bool:
        record["choice"] = choice
        return reader.put(record, size)

    return put


def _key(request: Request) -> str | None:
    """The client's idempotency key; raises `BadRequest` for one that is empty or too long."""
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not 1 <= len(key) <= MAX_KEY:
        message = f"an idempotency key has 1 to {MAX_KEY} characters, this one has {len(key)}"
        raise BadRequest(message, "Idempotency-Key")
    return key


def _key_of(key: str | None, choice: int) -> str | None:
    """Each choice's own; no header can hold a line break."""
    return f"{key}\n{choice}" if key is not None and choice else key


def _go_on(door: Door, tickets: Iterable[Ticket]) -> None:
    for ticket in tickets:
        door.relay.go_on(ticket.following)


def _let_go(door: Door, tickets: Iterable[Ticket], *, cancel: bool) -> None:
    for ticket in tickets:
        if not ticket.following.ended:
            door.relay.orphan(ticket.following)
            if cancel:
                door.relay.cancel(ticket.following)


async def _watch_client(request: Request, reader: Reader) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    reader.close(Gone())

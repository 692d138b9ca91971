"""One HTTP request for inference: submitted, followed, and let go when its client leaves."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from gateway.door import Door
from gateway.following import Following, Record
from gateway.intake import Ticket
from gateway.metrics import Watch, count_refused
from gateway.reader import Reader
from gateway.schemas.frames import MAX_KEY
from gateway.submission import Submission
from registry.tenants import Tenant
from streams.errors import BadRequest, Ended, MillstreamError

IDEMPOTENCY_KEY = "idempotency-key"
FIRST_RECORD_SECONDS = 5.0  # so long a stream's headers wait, to carry the status of an early error


class Exchange:
    """The records of a submitted request; `next` raises `Ended` for an error, or `Gone`."""

    def __init__(self, ticket: Ticket, reader: Reader, watch: Watch) -> None:
        self.ticket = ticket
        self._reader, self._watch = reader, watch
        self._first: Record | None = None
        self._failure: Ended | None = None

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
        self._watch.record(record)
        if record["type"] == "error":
            raise Ended(record["code"], record["message"])
        if record.get("finish_reason") == "cancelled":
            raise Ended("cancelled", "the request was cancelled")
        return record


@asynccontextmanager
async def exchange(
    door: Door, request: Request, tenant: Tenant, submission: Submission
) -> AsyncIterator[Exchange]:
    """Submit, and give the request up at the end.

    A request with an idempotency key can be asked for again, so it gets the grace period; any other
    is cancelled as soon as nobody can get its answer any more.
    """
    arrived = time.perf_counter()
    reader = Reader(lambda: door.relay.go_on(ticket.following))
    try:
        door.check_open()
        key = _key(request)
        ticket = await door.intake.submit(tenant, submission, reader.put, key)
    except MillstreamError as error:
        count_refused(tenant.name, error.code)
        raise
    door.relay.go_on(ticket.following)
    watch = Watch(tenant.name, ticket.model.name, submission.priority, arrived)
    leaving = asyncio.create_task(_watch_client(request, reader), name="client")
    try:
        yield Exchange(ticket, reader, watch)
    finally:
        leaving.cancel()
        _let_go(door, ticket.following, cancel=key is None)


def _key(request: Request) -> str | None:
    """The client's idempotency key; raises `BadRequest` for one that is empty or too long."""
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not 1 <= len(key) <= MAX_KEY:
        message = f"an idempotency key has 1 to {MAX_KEY} characters, this one has {len(key)}"
        raise BadRequest(message, "Idempotency-Key")
    return key


def _let_go(door: Door, following: Following, *, cancel: bool) -> None:
    if following.ended:
        return
    door.relay.orphan(following)
    if cancel:
        door.relay.cancel(following)


async def _watch_client(request: Request, reader: Reader) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    reader.close()

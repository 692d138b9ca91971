"""The loop that decides who is next and sends it to the workers, several at a time."""

import asyncio
from collections.abc import Sequence

import structlog

from dispatcher.books import Books
from dispatcher.ending import Endings
from dispatcher.lines import Queued
from dispatcher.metrics import observe_dispatch, observe_placed
from registry.store import Registry
from streams import marks, subjects, topology
from streams.connection import Broker, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable, ModelNotFound
from streams.headers import MESSAGE_ID, PRIORITY, Envelope
from streams.subjects import Pool

log = structlog.get_logger()

AT_ONCE = 32  # requests on their way to WORK: each waits for the broker twice
_RETRY_SECONDS = 0.25


class Sending:
    """Sends requests on for as long as `run` runs; `wake()` it when something has changed."""

    def __init__(self, broker: Broker, registry: Registry, books: Books, endings: Endings) -> None:
        self._broker, self._clock, self._registry = broker, broker.clock, registry
        self._books, self._endings = books, endings
        self._under_way: dict[str, Queued] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._under_way)

    def wake(self) -> None:
        self._changed.set()

    @property
    def oldest(self) -> Queued | None:
        """Of those under way, the one that has been in REQUESTS for longest."""
        return min(self._under_way.values(), key=lambda item: item.seq, default=None)

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while len(self._under_way) < AT_ONCE and (found := self._next()):
                    item, version = found
                    lane = self._books.take(item, version, self._clock.now())
                    self._under_way[item.request_id] = item
                    pool = Pool(self._books.model, version, lane)
                    tasks.create_task(self._send(item, pool), name=f"send-{item.request_id}")

    def _next(self) -> tuple[Queued, str] | None:
        """The next request and the version that serves it, if there is one with room."""
        while found := self._books.next(self.version_for, self._clock.now()):
            item, version = found
            if version is None:
                self._refuse(item)
            elif self._books.outlook.too_late(item, self._clock.now()):
                self._expire(item)
            else:
                return item, version
        return None

    def _expire(self, item: Queued) -> None:
        self._books.queue.remove(item.request_id)
        message = "the deadline would pass before the first output"
        self._endings.put(item, "deadline_exceeded", message)

    def version_for(self, item: Queued) -> str | None:
        """The version that is to serve a request now; None if the registry has it no more."""
        model = self._books.model
        named = f"{model}@{item.version}" if item.version else model
        try:
            _, version = self._registry.resolve(named)
        except ModelNotFound:
            return None
        return version.id

    def _refuse(self, item: Queued) -> None:
        self._books.queue.remove(item.request_id)
        named = f"the version {item.version!r} of {self._books.model!r}"
        message = f"{named if item.version else f'the model {self._books.model!r}'} is gone"
        self._endings.put(item, "model_not_found", message)

    async def _send(self, item: Queued, pool: Pool) -> None:
        try:
            while not await self._has_sent(item, pool):
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            del self._under_way[item.request_id]
            self._changed.set()

    async def _has_sent(self, item: Queued, pool: Pool) -> bool:
        """True when there is nothing left to do: it was sent, or was not to be."""
        if self._clock.until(item.deadline) < 0:
            self._books.not_sent(item.request_id)
            self._endings.put(item, "deadline_exceeded", "the deadline passed in the queue")
            return True
        try:
            await self._move(item, pool)
        except (BrokerUnavailable, StoreRefused) as error:  # no answer, or WORK is full: it drains
            log.warning("sending_waits", request_id=item.request_id, reason=str(error))
            return False
        return True

    async def _move(self, item: Queued, pool: Pool) -> None:
        """Put a request into WORK and only then acknowledge it.

        A crash between repeats with the same message id, which the broker recognises.
        """
        message = await self._broker.get(topology.REQUESTS, item.seq)
        if message is None:  # an earlier leader has sent it on
            self._books.not_sent(item.request_id)
            return
        now_ms = self._clock.now_ms()
        envelope = Envelope.from_headers(message.headers)
        placed = self._books.place(item.request_id, _marks(envelope), envelope.adapter)
        subject = subjects.work(pool, placed.worker)
        headers = _work_headers(message, item, now_ms)
        stored = await self._broker.store(subject, message.data, headers, repeats=True)
        self._books.sent(item.request_id, stored.seq, stored.duplicate)
        await self._broker.publish(item.reply, b"+ACK")
        observe_placed(self._books.model, placed.why)
        self._compare(item, envelope.told_wait, (now_ms - item.accepted) / 1000)

    def _compare(self, item: Queued, told: int | None, waited: float) -> None:
        """What was told at acceptance, in ms, with what came of it."""
        told_seconds = None if told is None else told / 1000
        observe_dispatch(self._books.model, item.priority, waited, told_seconds)
        if told_seconds is not None:
            self._books.outlook.pace.waited(told_seconds, waited)


def _marks(envelope: Envelope) -> Sequence[int]:
    try:
        return marks.from_header(envelope.marks)
    except ValueError as error:  # it runs without them
        log.warning("marks_unreadable", request_id=envelope.request_id, reason=str(error))
        return ()


def _work_headers(message: StoredMessage, item: Queued, now_ms: int) -> dict[str, str]:
    """The request's own headers, its priority (whatever lane it takes) and when it was dispatched.

    The broker's are left behind.
    """
    kept = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
    own = {PRIORITY: item.priority.value, MESSAGE_ID: item.request_id}
    return kept | own | {"Dispatched": str(now_ms)}

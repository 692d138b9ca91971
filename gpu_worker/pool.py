"""One model version served by this worker: its engine, its pulls, its attempts, its credit."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import structlog

from gpu_worker.attempt import Attempt
from gpu_worker.credit import Credit, Rate
from gpu_worker.driver import Driver, EngineCrashed
from gpu_worker.ended_logs import EndedLogs, put_back
from gpu_worker.engine import Caching, Counting, Engine, Output, Preemptive, Room, Throttled
from gpu_worker.hand_over import HandOver
from gpu_worker.heart import Heart
from gpu_worker.hold import Hold
from gpu_worker.mount import Mount
from gpu_worker.outcome import Finished, Identity, Stopped
from gpu_worker.progress import PROGRESS_SECONDS, Counts, Progress
from gpu_worker.pulls import Pulls
from gpu_worker.starts import Starts
from gpu_worker.stats import Stats
from gpu_worker.watch import EngineHung, failure_of
from streams import dead_letters
from streams.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable
from streams.messages import Beat
from streams.patience import ended
from streams.pull import Delivery
from streams.subjects import Priority
from streams.written import Page, Question

log = structlog.get_logger()

_LOOK_SECONDS = 0.1  # between two looks at who could take over what
_TAKEN_SECONDS = 1.0  # for which beats tell that something was taken: one of them may be lost
_MOST_TAKEN = 1024  # of which one beat tells
_CLOSING_SECONDS = 2.0  # for what was stopped at the end of draining to be given back
Observer = Callable[[Finished], None]


class Pool:
    """Serves one model version until told to drain.

    Its engine comes (`put`) and goes (`take`). While there is none it announces room for one
    request of up to `context` tokens, which will wait for an engine. `stirred` is called when it
    begins or ends a request, and when its engine has failed.
    """

    def __init__(
        self,
        broker: Broker,
        who: Identity,
        context: int,
        observe: Observer,
        engine_timeout_seconds: float,
    ) -> None:
        self.who = who
        self._absent = Room(1, context)
        self.credit = Credit(self._absent)
        self._broker, self._observe = broker, observe
        self._throttled: Throttled | None = None
        self._counting: Counting | None = None
        self._engine_timeout = engine_timeout_seconds
        self._mount = Mount(self._deliver, who.model)
        self._starts = Starts()
        self._ended = EndedLogs()
        self._attempts: dict[str, Attempt] = {}
        self._hold = Hold(broker, self._attempts)
        self._serving: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._pulls = Pulls(broker, who, self._room, self._take)
        self._heart = Heart(broker, who, self._telling)
        self._rate = Rate(time.monotonic())
        self._progress = Progress()
        self._told_at = -inf
        self._is_open = True
        self.draining = False
        self.failure: EngineCrashed | EngineHung | None = None  # of the engine it had last
        self.stirred: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        return not self._attempts

    @property
    def stats(self) -> Stats | None:
        """What its engine counts, while it has one that does."""
        return self._counting.stats if self._counting else None

    @property
    def taking(self) -> bool:
        return self._is_open and not self.draining

    def open(self, is_open: bool) -> None:
        """Whether to take new work. Idempotent."""
        if is_open != self._is_open:
            self._is_open = is_open
            if not is_open:
                self._pulls.withdraw()
            self._wake()

    def put(self, engine: Engine) -> None:
        """Run a loaded engine, first over what has waited for it."""
        self.failure = None
        preempts = isinstance(engine, Preemptive) and engine.preempts
        self.credit.resize(engine.room(), preempts)
        self._throttled = engine if isinstance(engine, Throttled) else None
        self._counting = engine if isinstance(engine, Counting) else None
        self._heart.cache = engine if isinstance(engine, Caching) else None
        driver = self._mount.put(engine)
        if self._tasks:
            self._tasks.create_task(self._watch(driver), name="engine")
        self._wake()

    async def take(self) -> None:
        """Stop the engine and give back its memory."""
        self._lose_room()
        await self._mount.take()

    def _lose_room(self) -> None:
        self._throttled = self._counting = self._heart.cache = None
        self.credit.resize(self._absent)
        self._heart.changed()

    async def release(self) -> None:
        """Give back everything that is held, so that another worker need not wait."""
        for attempt in list(self._attempts.values()):
            attempt.stop(Stopped.RELEASED)
        await ended(self._serving, _CLOSING_SECONDS)

    async def run(self, beat_seconds: float, ack_wait_seconds: float) -> None:
        """Pull, run and beat until cancelled."""
        await self._heart.listen()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._pulls.begin(tasks, ack_wait_seconds)
            tasks.create_task(self._heart.run(partial(self._rest, beat_seconds)), name="beat")
            tasks.create_task(self._hold.keep(beat_seconds, ack_wait_seconds), name="hold")
            tasks.create_task(self._hold.let_go(ack_wait_seconds), name="let-go")
            if driver := self._mount.driver:
                tasks.create_task(self._watch(driver), name="engine")

    def cancel(self, tenant: str, request_id: str) -> None:
        """The client wants no more of it. Idempotent; unknown requests are somebody else's."""
        attempt = self._attempts.get(request_id)
        if attempt and attempt.envelope.tenant == tenant:
            attempt.stop(Stopped.CANCELLED)

    def find(self, tenant: str, request_id: str) -> bool:
        """Whether the request runs here, or has ended here: then a lost log is put back."""
        running = self._attempts.get(request_id)
        if ended := self._ended.get(tenant, request_id, time.monotonic()):
            assert self._tasks
            self._tasks.create_task(put_back(ended), name=f"put-back-{request_id}")
        return bool(ended or (running and running.envelope.tenant == tenant))

    def written(self, question: Question) -> Page | None:
        """What is stored of a log that is written here; None of any other."""
        attempt = self._attempts.get(question.request_id)
        own = attempt and attempt.envelope.tenant == question.tenant
        return attempt.written(question) if attempt and own else None

    async def drain(self, seconds_left: Callable[[], float]) -> int:
        """Take nothing new, and be empty by the time that none is left; how many were handed over.

        What ends in time is finished here. The rest, first what has not begun, goes to other
        workers of the pool as soon as they have room, and at the end in any case.
        """
        self.draining = True
        self._heart.changed()
        await self._pulls.end()
        handed_over = 0
        async with HandOver(self._broker, self.who) as others:
            while self._attempts and (left := seconds_left()):
                for attempt in others.choose(self._attempts.values(), left):
                    attempt.stop(Stopped.RELEASED)
                    handed_over += 1
                await ended(self._serving, min(left, _LOOK_SECONDS))
        handed_over += sum(attempt.goes_on for attempt in self._attempts.values())
        await self.release()
        return handed_over

    def _room(self, priority: Priority) -> int:
        self._follow_capacity()
        return self.credit.pull_batch(priority) if self.taking else 0

    def _wake(self) -> None:
        """Credit has grown, or may have."""
        self._heart.changed()
        self._pulls.wake()

    def _follow_capacity(self) -> None:
        """Credit is what a throttled engine has of the moment; asked at each pull and beat."""
        if self._throttled:
            before, self.credit.capacity = self.credit.capacity, self._throttled.capacity()
            if self.credit.capacity > before:
                self._wake()

    def _follow_growth(self) -> None:
        """Who has generated a part of what it may needs less room for the rest."""
        for request_id, attempt in self._attempts.items():
            envelope = attempt.envelope
            self.credit.grown(request_id, envelope.prompt_tokens, envelope.cost, attempt.tokens)

    def _take(self, delivery: Delivery) -> None:
        assert self._tasks
        if self.draining:
            self._tasks.create_task(_nak(delivery), name=f"return-{delivery.seq}")
            return
        envelope = dead_letters.envelope_of_work(delivery)
        if envelope is None:
            self._tasks.create_task(_bury(self._broker, delivery), name=f"bury-{delivery.seq}")
            return
        if running := self._attempts.get(envelope.request_id):
            running.redelivered(delivery)  # our own work again, after its ack wait: keep going
            return
        parts = self._broker, self._mount, self._starts, delivery, envelope, self.who, self._ended
        self._begin(Attempt(*parts))

    def _begin(self, attempt: Attempt) -> None:
        assert self._tasks
        request_id = attempt.envelope.request_id
        self._attempts[request_id] = attempt
        envelope = attempt.envelope
        self.credit.take(request_id, envelope.prompt_tokens, envelope.cost, attempt.priority)
        self._heart.changed()
        self.stirred()
        serving = self._tasks.create_task(self._serve(attempt), name=f"attempt-{request_id}")
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, attempt: Attempt) -> None:
        request_id = attempt.envelope.request_id
        try:
            if finished := await attempt.run():
                self._observe(finished)
        except BrokerUnavailable as error:
            log.warning("work_not_settled", request_id=request_id, reason=str(error))
        finally:
            del self._attempts[request_id]
            self.credit.free(request_id)
            self._wake()
            self.stirred()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._rate.total += len(output.tokens)
            if attempt := self._attempts.get(output.request_id):
                attempt.accept(output)

    def beat(self) -> Beat:
        """This worker's credit of the moment."""
        self._follow_capacity()
        self._follow_growth()
        credit = self.credit
        return Beat(
            worker=self.who.worker,
            model=self.who.model,
            version=self.who.version,
            free_sequences=credit.free_sequences if self.taking else 0,
            free_tokens=credit.free_tokens if self.taking else 0,
            running=min(credit.held, credit.max_sequences),
            waiting=max(0, credit.held - credit.max_sequences),
            max_sequences=credit.max_sequences,
            kv_tokens=credit.kv_tokens,
            generated_tokens=self._rate.total,
            tokens_per_second=round(self._rate.sample(time.monotonic()), 3),
            pulled=dict(self._pulls.pulled),
            pulled_own=self._pulls.pulled_own,
            draining=self.draining,
            resident=self._mount.driver is not None,
            room=self._room_by_priority() if credit.preempts else {},
        )

    def _telling(self) -> Beat:
        """The same with how far requests have come, which takes turns: for the dispatcher alone."""
        now = time.monotonic()
        progress = self._progress.some(self._counts, now)
        return replace(self.beat(), progress=progress, taken=self._taken(now, bool(progress)))

    def _taken(self, now: float, again: bool) -> list[str]:
        """What has come since the last beat, or lately; for a new leader everything."""
        since = self._told_at if not again else now - _TAKEN_SECONDS
        if self._heart.mustered_at > now - _TAKEN_SECONDS:
            since = -inf
        self._told_at = now
        attempts = self._attempts.values()
        return [each.delivery.reply for each in attempts if each.taken_at >= since][-_MOST_TAKEN:]

    def _rest(self, seconds: float) -> float:
        """Until the next beat: less while there is progress to tell of."""
        return min(seconds, PROGRESS_SECONDS) if self._attempts else seconds

    def _room_by_priority(self) -> dict[str, tuple[int, int]]:
        return {str(p): self.credit.room(p) if self.taking else (0, 0) for p in Priority}

    def _counts(self) -> Counts:
        return [(attempt.delivery.seq, attempt.tokens) for attempt in self._attempts.values()]

    async def _watch(self, driver: Driver) -> None:
        """Until the engine goes; when it has failed, its work is given back at once."""
        if failure := await failure_of(driver, self.who.model, self._engine_timeout):
            await self._fail(driver, failure)

    async def _fail(self, driver: Driver, failure: EngineCrashed | EngineHung) -> None:
        self._mount.lose()
        self._lose_room()
        self.open(False)
        attempts = list(self._attempts.values())
        culprit = any(attempt.on_trial for attempt in attempts)
        for attempt in attempts:
            attempt.lose_engine(str(failure), culprit)
        if isinstance(failure, EngineCrashed):
            await driver.ended  # its memory is free
        self.failure = failure
        self.stirred()


async def _bury(broker: Broker, delivery: Delivery) -> None:
    try:
        await dead_letters.lay_aside(broker, delivery)
    except (BrokerUnavailable, StoreRefused) as error:  # then its ack wait brings it back
        log.warning("work_not_buried", seq=delivery.seq, reason=str(error))


async def _nak(delivery: Delivery) -> None:
    try:
        await delivery.nak()
    except BrokerUnavailable as error:  # then its ack wait brings it back
        log.warning("work_not_returned", seq=delivery.seq, reason=str(error))

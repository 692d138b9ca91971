"""The fleet as a gateway knows it: the models that it wakes, and how far each wake is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import structlog
from nats.aio.msg import Msg

from streams import subjects
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable
from streams.records.fleet.cold_start import ColdStart
from streams.records.fleet.fleet_plan import FleetPlan
from streams.records.fleet.fleet_store import FleetStore
from streams.records.fleet.machine_list import MachineList
from streams.records.fleet.waking import InvalidWaking, Waking, parse_waking

log = structlog.get_logger()

READ_SECONDS = 30.0  # after which the records are read again, if nobody has told of a change
MOVED_SECONDS = 1.0
NEWS_SECONDS = 5.0  # a leader tells of each wake every second; older news say nothing
OnWaking = Callable[[Waking], None]


class FleetView:
    """The fleet as one gateway knows it: from its records, which outlive every process, and news.

    Call `open` before the first question, and keep `run` running.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker, self._store = broker, FleetStore(broker)
        self._plan, self._machines = FleetPlan(), MachineList()
        self._news: dict[str, tuple[Waking, float]] = {}
        self._told: dict[str, Waking] = {}  # to listeners, last
        self._listeners: dict[OnWaking, str] = {}
        self._stale = asyncio.Event()

    async def open(self) -> None:
        """Hear of changes, and then read the records; raises `BrokerUnavailable`."""
        for changed in (subjects.FLEET_PLAN_CHANGED, subjects.FLEET_MACHINES_CHANGED):
            await self._broker.subscribe(changed, self._on_change)
        await self._broker.subscribe(subjects.ALL_WAKING, self._on_waking)
        self._broker.on_reconnect.append(self._stale.set)
        await self._read()

    async def run(self) -> None:
        """Read the records whenever they change, and now and then, until cancelled.

        While the broker does not answer, what was read last holds.
        """
        while True:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await self._stale.wait()
            except TimeoutError:
                pass
            self._stale.clear()
            try:
                await self._read()
            except BrokerUnavailable as error:
                log.warning("fleet_not_read", reason=str(error))

    async def _read(self) -> None:
        self._machines = await self._store.read_machines()
        self._plan = await self._store.read_plan()

    @property
    def is_there(self) -> bool:
        """True if there are machines to be had, and a fleet service has planned."""
        return bool(self._machines.types and self._plan.revision)

    def cold_start(self, model: str) -> ColdStart | None:
        """Return how long a model takes to its first worker; None if the fleet does not wake it."""
        return self._plan.cold_starts.get(model) if self._machines.types else None

    def seconds_to_worker(self, model: str) -> float | None:
        """Return the seconds until a model at zero has a worker; None if no fleet wakes it.

        As the fleet says of a wake under way, else that of a whole cold start.
        """
        cold_start, now = self.cold_start(model), self._broker.clock.now()
        if cold_start is None:
            return None
        news = self.waking(model)
        left = news.seconds_left(now) if news else None
        return cold_start.seconds if left is None else left

    def waking(self, model: str) -> Waking | None:
        """Return how far the wake of a model is; None if nothing was heard of one lately."""
        waking, heard_at = self._news.get(model, (None, 0.0))
        return waking if self._broker.clock.now() - heard_at < NEWS_SECONDS else None

    def note_awake(self, model: str) -> None:
        """Forget the news of a model's wake, which is over: it has a worker."""
        self._news.pop(model, None)

    @contextmanager
    def listening(self, model: str, on_waking: OnWaking) -> Iterator[None]:
        """Call `on_waking` with the news of a model's wake while the block runs; "": of all.

        News are another phase, or a time that has moved by more than `MOVED_SECONDS`: thousands of
        requests may wait, and each is told.
        """
        self._listeners[on_waking] = model
        try:
            yield
        finally:
            del self._listeners[on_waking]

    async def follow(self, model: str) -> AsyncIterator[Waking]:
        """Yield how far the wake of a model is, now and at all news, until closed."""
        queue = asyncio.Queue[Waking]()
        with self.listening(model, queue.put_nowait):
            if first := self.waking(model):
                yield first
            while True:
                yield await queue.get()

    async def _on_waking(self, msg: Msg) -> None:
        try:
            waking = parse_waking(msg.subject, msg.headers or {}, msg.data)
        except InvalidWaking as error:
            log.warning("waking_ignored", subject=msg.subject, reason=str(error))
            return
        is_wake = self.waking(waking.model) is None
        self._news[waking.model] = waking, self._broker.clock.now()
        if not is_wake and not _differs(waking, self._told[waking.model]):
            return
        self._told[waking.model] = waking
        for listener, model in list(self._listeners.items()):
            if model in ("", waking.model):
                listener(waking)

    async def _on_change(self, _: Msg) -> None:
        self._stale.set()


def _differs(waking: Waking, told: Waking) -> bool:
    """Return True if a client would count down to another time, or wait for something else."""
    if waking.phase != told.phase or None in (waking.ready_at, told.ready_at):
        return (waking.phase, waking.ready_at) != (told.phase, told.ready_at)
    return abs((waking.ready_at or 0.0) - (told.ready_at or 0.0)) > MOVED_SECONDS

"""Loads and evicts a worker's engines as `EvictionPlanner` decides, and handles their failures.

An engine that has crashed or could not be loaded is tried again after a pause that doubles; the
worker's other models go on. Models come and go by `add` and `remove` while the others are served.
Failures that this process cannot recover from end it: a hung step, a lost device, and the crash of
the only engine, for which a new process is the cleaner start.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import structlog

from gpu_worker.compute_meter import ComputeMeter
from gpu_worker.engines.driver import EngineCrashed
from gpu_worker.engines.engine_watchdog import EngineHung
from gpu_worker.identity import WorkerIdentity
from gpu_worker.models.loading import Loader
from gpu_worker.models.memory_plan import MemoryShares
from gpu_worker.models.metrics import LOAD_FAILURES
from gpu_worker.models.model_eviction import EvictionPlanner
from gpu_worker.pool.model_server import ModelServer
from registry.models import Model, Version

log = structlog.get_logger()

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 60.0
MAX_REASON = 300  # characters of why a model is not loaded, as heartbeats tell it
BACKOFF_RESET_SECONDS = 30.0  # an engine that ran for this long begins a new row of failures


@dataclass
class ManagedModel:
    """One model of the worker, with or without a loaded engine; times are monotonic seconds.

    `ready_at` is when its engine was ready, 0 without one. `failures` counts failures in a row,
    after which nothing is loaded before `backoff_until`. A model that `is_new` was never loaded
    here; one that `is_leaving` is served no longer.
    """

    server: ModelServer
    model: Model
    version: Version
    is_new: bool = True
    is_leaving: bool = False
    ready_at: float = 0.0
    failures: int = 0  # in a row
    backoff_until: float = 0.0

    def record_failure(self, now: float) -> float:
        """Count a failed load or a crash at `now`, and return the seconds until the next try.

        These are 1, 2, 4 … up to 60 for failures in a row. An engine that was ready for more than
        30 s before it failed starts again at one second.
        """
        steady = self.ready_at and now - self.ready_at > BACKOFF_RESET_SECONDS
        self.failures = 1 if steady else self.failures + 1
        pause = min(MIN_BACKOFF_SECONDS * 2.0 ** (self.failures - 1), MAX_BACKOFF_SECONDS)
        self.ready_at, self.backoff_until = 0.0, now + pause
        return pause


class ModelManager:
    """Loads and evicts the engines of one worker's models, and backs off from those that fail.

    A model that has work but no engine is loaded as soon as the planner finds memory for it; a new
    one without work, too, if it fits beside what is loaded. `meter` counts the time of loads. With
    `limits_memory` a model that is alone on the worker is bounded by its share, too. `not_loaded`
    is why models are not served that should be, by `MODEL@VERSION`; heartbeats tell it.
    `on_change` is called when a model was loaded, has failed, or was removed.
    """

    def __init__(
        self,
        planner: EvictionPlanner,
        loader: Loader,
        meter: ComputeMeter,
        limits_memory: bool,
    ) -> None:
        self._models: dict[str, ManagedModel] = {}
        self._planner, self._loader, self._limits_memory = planner, loader, limits_memory
        self.meter = meter
        self.identities: dict[str, WorkerIdentity] = {}  # of all models that there ever were
        self.not_loaded: dict[str, str] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._changed, self._failed = asyncio.Event(), asyncio.Event()
        self._deciding = asyncio.Lock()
        self._serve: Callable[[str, ManagedModel], asyncio.Task[None]] | None = None
        self._serving: dict[str, asyncio.Task[None]] = {}

    @property
    def models(self) -> Mapping[str, ManagedModel]:
        """All models of the worker by `MODEL@VERSION`, with or without an engine."""
        return self._models

    @property
    def servers(self) -> list[ModelServer]:
        """Model servers of all models, with or without an engine."""
        return [managed.server for managed in self._models.values()]

    @property
    def taken_bytes(self) -> dict[str, int]:
        """The bytes that each loaded or loading model takes, as far as it is planned."""
        return self._planner.taken_bytes

    def will_load(self, name: str) -> bool:
        """Return True for a new model that will be loaded without waiting for memory."""
        is_placed = name in self._planner.loaded or self._planner.fits(name)
        return self._models[name].is_new and is_placed

    def plan_memory(self, memory: MemoryShares) -> None:
        """Take over the memory of the worker's models, of those about to be added, too."""
        self._planner.plan(memory.budget, memory.shares, memory.needs)

    def set_taken(self, name: str, taken_bytes: int) -> None:
        """Record what a model takes that was loaded while it was alone, if it is loaded."""
        if name in self._planner.loaded:
            self._planner.set_taken(name, taken_bytes)

    def add(self, name: str, managed: ManagedModel) -> None:
        """Serve another model, whose memory is planned already; returns at once."""
        self._models[name] = managed
        self.identities[name] = managed.server.identity
        self.meter.add(name)
        managed.server.on_change = self._notify_change
        managed.server.not_loaded = self.not_loaded
        if self._serve:
            managed.server.set_accepting(False)  # before it is decided whether it is loaded now
            self._serving[name] = self._serve(name, managed)
        self._notify_change()

    async def remove(self, name: str, seconds_left: Callable[[], float]) -> None:
        """Drain one model within `seconds_left()`, free its memory, and serve it no longer.

        Its requests end here or are handed over; those of other models are not touched.
        """
        managed = self._models[name]
        managed.is_leaving = True
        handed_over = await managed.server.leave(seconds_left)
        async with self._deciding:  # a load of it has ended
            await managed.server.stop_engine()
            if name in self._planner.loaded:
                self._planner.mark_closed(name)
            if serving := self._serving.pop(name, None):
                serving.cancel()
                await asyncio.wait({serving})
            self.meter.retire(name)
            del self._models[name]
        log.info("model_removed", model=name, handed_over=handed_over)
        self._notify_change()
        self.on_change()

    @property
    def can_serve(self) -> bool:
        """True unless every model has failed, and waits for the pause before its next try to end.

        Models that take turns in memory may be without an engine meanwhile. A worker without
        models is ready for one.
        """
        now = time.monotonic()
        return not self._models or any(
            managed.backoff_until <= now for managed in self._models.values()
        )

    async def close(self) -> None:
        """Stop every engine and free its memory; waits for the step that each one is in."""
        for server in self.servers:
            await server.stop_engine()

    async def preload(self) -> None:
        """Load models in the order given, skipping each that does not fit in the memory still free.

        Returns when these are ready. Raises what loading raises; no further model is loaded then.
        """
        for name, managed in self._models.items():
            if self._planner.fits(name):
                await self._load_engine(name, managed)

    async def run(self, beat_seconds: float, ack_wait_seconds: float) -> None:
        """Serve the models, and load and evict their engines, until cancelled.

        A crashed engine or a failed load is tried again after a pause. Raises `EngineCrashed` or
        `EngineHung`, in an exception group, when only a new process can help; all work has been
        released to other workers by then.
        """
        async with asyncio.TaskGroup() as tasks:

            def serve(name: str, managed: ManagedModel) -> asyncio.Task[None]:
                running = managed.server.run(beat_seconds, ack_wait_seconds)
                return tasks.create_task(running, name=name)

            self._serve = serve
            self._serving = {name: serve(name, each) for name, each in self._models.items()}
            tasks.create_task(self._load_and_evict(), name="load-and-evict")
            tasks.create_task(self._raise_when_fatal(), name="failures")

    def _notify_change(self) -> None:
        self._changed.set()
        self._failed.set()

    async def _load_and_evict(self) -> None:
        while True:
            self._changed.clear()
            async with self._deciding:
                self._back_off_crashed()
                again_at = await self._apply_next_decision(time.monotonic())
            try:
                async with asyncio.timeout_at(again_at):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _apply_next_decision(self, now: float) -> float | None:
        """Do the planner's next step; return the loop time to check again without a change.

        None: nothing is due before the next change.
        """
        backing_off = {name for name, each in self._models.items() if each.backoff_until > now}
        leaving = {name for name, each in self._models.items() if each.is_leaving}
        busy = {name for name, each in self._models.items() if not each.server.idle}
        self._planner.observe(busy - backing_off - (leaving - self._planner.loaded), now)
        decision = self._planner.decide(now)
        load = decision.load or self._find_new(backing_off | leaving)
        closed = decision.draining | backing_off | ({load} if load else set())
        for name, managed in self._models.items():
            managed.server.set_accepting(name not in closed)
        if load:
            await self._load(load)
        elif decision.evict:
            await self._evict(decision.evict)
        else:
            ends = [self._models[name].backoff_until for name in backing_off]
            check_at = min([decision.next_check_at, *ends])
            if check_at == float("inf"):
                return None
            return asyncio.get_running_loop().time() + check_at - now
        return 0.0

    def _find_new(self, excluded: Set[str]) -> str | None:
        """Return a model to load although it has no work: a new one that fits in free memory."""
        for name, managed in self._models.items():
            is_new = managed.is_new and name not in excluded | self._planner.loaded
            if is_new and self._planner.fits(name):
                return name
        return None

    async def _load(self, name: str) -> None:
        managed = self._models[name]
        try:
            await self._load_engine(name, managed)
        except Exception as error:  # of files, of memory, of the model's code: try again later
            self._planner.mark_closed(name)
            pause = managed.record_failure(time.monotonic())
            managed.server.set_accepting(False)
            log.exception("model_not_loaded", model=name, retry_after_seconds=pause)
            self.not_loaded[name] = f"{type(error).__name__}: {error}"[:MAX_REASON]
            LOAD_FAILURES.labels(managed.model.name, "load").inc()
            del error
            await managed.server.release_all()
            self.on_change()

    async def _load_engine(self, name: str, managed: ManagedModel) -> None:
        taken = self._planner.mark_loading(name, time.monotonic())
        is_bounded = self._limits_memory or len(self._models) > 1
        with self.meter.loading(name):
            loaded = await self._loader.load(
                managed.model, managed.version, (taken or None) if is_bounded else None
            )
        managed.server.load = loaded.load
        managed.server.attach_engine(loaded.engine)
        managed.ready_at, managed.is_new = time.monotonic(), False
        self._planner.mark_ready(name, managed.ready_at)
        self.not_loaded.pop(name, None)
        self.on_change()

    async def _evict(self, name: str) -> None:
        managed = self._models[name]
        loaded = time.monotonic() - managed.ready_at
        await managed.server.stop_engine()
        self._planner.mark_closed(name)
        log.info("model_closed", model=name, loaded_seconds=round(loaded, 1))

    def _back_off_crashed(self) -> None:
        """Begin the backoff of each model whose engine has crashed since the last check."""
        for name, managed in self._models.items():
            if managed.server.failure and name in self._planner.loaded:
                self._planner.mark_closed(name)
                pause = managed.record_failure(time.monotonic())
                log.warning("engine_backoff", model=name, retry_after_seconds=pause)

    async def _raise_when_fatal(self) -> None:
        """Wait for a failure that this process cannot recover from, release all work, raise it."""
        while not (failure := self._find_fatal_failure()):
            self._failed.clear()
            await self._failed.wait()
        await asyncio.gather(*(server.drain(lambda: 0.0) for server in self.servers))
        raise failure

    def _find_fatal_failure(self) -> EngineCrashed | EngineHung | None:
        for managed in self._models.values():
            failure = managed.server.failure
            if isinstance(failure, EngineHung) or (failure and failure.device_lost):
                return failure
            if failure and len(self._models) == 1:
                return failure
        return None

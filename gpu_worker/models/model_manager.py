"""Loads and evicts a worker's engines as `EvictionPlanner` decides, and handles their failures.

An engine that has crashed or could not be loaded is tried again after a pause that doubles; the
worker's other models go on. Failures that this process cannot recover from end it: a hung step, a
lost device, and the crash of the only engine, for which a new process is the cleaner start.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from gpu_worker.compute_meter import ComputeMeter
from gpu_worker.engines.driver import EngineCrashed
from gpu_worker.engines.engine_watchdog import EngineHung
from gpu_worker.identity import WorkerIdentity
from gpu_worker.models.loading import Loader
from gpu_worker.models.model_eviction import EvictionPlanner
from gpu_worker.pool.model_server import ModelServer
from registry.models import Model, Version

log = structlog.get_logger()

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 60.0
BACKOFF_RESET_SECONDS = 30.0  # an engine that ran for this long begins a new row of failures


@dataclass
class ManagedModel:
    """One model of the worker, with or without a loaded engine; times are monotonic seconds.

    `memory_bytes` is its share of memory (None: not bounded). `ready_at` is when its engine was
    ready, 0 without one. `failures` counts failures in a row, after which nothing is loaded before
    `backoff_until`.
    """

    server: ModelServer
    model: Model
    version: Version
    memory_bytes: int | None
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

    `models` has all configured models by name. A model that has work but no engine is loaded as
    soon as the planner finds memory for it. `meter` counts the time of loads.
    """

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        planner: EvictionPlanner,
        loader: Loader,
        meter: ComputeMeter,
    ) -> None:
        self._models, self._planner, self._loader = models, planner, loader
        self.meter = meter
        self._changed, self._failed = asyncio.Event(), asyncio.Event()
        for managed in models.values():
            managed.server.on_change = self._notify_change

    @property
    def servers(self) -> list[ModelServer]:
        """Model servers of all configured models, with or without an engine."""
        return [managed.server for managed in self._models.values()]

    @property
    def identities(self) -> dict[str, WorkerIdentity]:
        """The worker's identity for each of its models, by the names of `models`."""
        return {name: managed.server.identity for name, managed in self._models.items()}

    @property
    def can_serve(self) -> bool:
        """True unless every model has failed, and waits for the pause before its next try to end.

        Models that take turns in memory may be without an engine meanwhile.
        """
        now = time.monotonic()
        return any(managed.backoff_until <= now for managed in self._models.values())

    async def close(self) -> None:
        """Stop every engine and free its memory; waits for the step that each one is in."""
        for server in self.servers:
            await server.stop_engine()

    async def preload(self) -> None:
        """Load models in the order given, skipping each that does not fit in the memory still free.

        Returns when these are ready. Raises what loading raises; no further model is loaded then.
        """
        for name, managed in self._models.items():
            if self._planner.shares[name] <= self._planner.free_bytes:
                self._planner.mark_loading(name, time.monotonic())
                await self._load_engine(name, managed)

    async def run(self) -> None:
        """Load and evict engines, as requests come and go, until cancelled.

        A crashed engine or a failed load is tried again after a pause. Raises `EngineCrashed` or
        `EngineHung`, in an exception group, when only a new process can help; all work has been
        released to other workers by then.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load_and_evict(), name="load-and-evict")
            tasks.create_task(self._raise_when_fatal(), name="failures")

    def _notify_change(self) -> None:
        self._changed.set()
        self._failed.set()

    async def _load_and_evict(self) -> None:
        while True:
            self._changed.clear()
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
        busy = {name for name, each in self._models.items() if not each.server.idle}
        self._planner.observe(busy - backing_off, now)
        decision = self._planner.decide(now)
        for name, managed in self._models.items():
            managed.server.set_accepting(name not in decision.draining | backing_off)
        if decision.load:
            await self._load(decision.load)
        elif decision.evict:
            await self._evict(decision.evict)
        else:
            ends = [self._models[name].backoff_until for name in backing_off]
            check_at = min([decision.next_check_at, *ends])
            if check_at == float("inf"):
                return None
            return asyncio.get_running_loop().time() + check_at - now
        return 0.0

    async def _load(self, name: str) -> None:
        managed = self._models[name]
        self._planner.mark_loading(name, time.monotonic())
        try:
            await self._load_engine(name, managed)
        except Exception as error:  # of files, of memory, of the model's code: try again later
            self._planner.mark_closed(name)
            pause = managed.record_failure(time.monotonic())
            managed.server.set_accepting(False)
            log.exception("model_not_loaded", model=name, retry_after_seconds=pause)
            del error
            await managed.server.release_all()

    async def _load_engine(self, name: str, managed: ManagedModel) -> None:
        with self.meter.loading(name):
            loaded = await self._loader.load(managed.model, managed.version, managed.memory_bytes)
        managed.server.load = loaded.load
        managed.server.attach_engine(loaded.engine)
        managed.ready_at = time.monotonic()
        self._planner.mark_ready(name, managed.ready_at)

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

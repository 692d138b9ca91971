"""Keeps a worker's engines: loads and closes what `EvictionPlanner` decides, and what engines fail at.

An engine that has crashed, or could not be loaded, is tried again after a pause that doubles; the
worker's other models go on. What cannot be mended in this process ends it: a hung step, a device
that is lost, and the crash of the only engine, for which a new process is the cleaner start.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from gpu_worker.engines.driver import EngineCrashed
from gpu_worker.engines.engine_watchdog import EngineHung
from gpu_worker.models.loading import Loader
from gpu_worker.models.model_eviction import EvictionPlanner
from gpu_worker.pool.model_server import ModelServer
from registry.models import Model, Version

log = structlog.get_logger()

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 60.0
BACKOFF_RESET_SECONDS = 30.0  # an engine that lived this long has not failed in a row


@dataclass
class ManagedModel:
    """One model of the worker, with or without an engine."""

    server: ModelServer
    model: Model
    version: Version
    memory_bytes: int | None
    ready_at: float = 0.0
    failures: int = 0  # in a row
    backoff_until: float = 0.0

    def record_failure(self, now: float) -> float:
        """Count a failure; the seconds until the next try."""
        steady = self.ready_at and now - self.ready_at > BACKOFF_RESET_SECONDS
        self.failures = 1 if steady else self.failures + 1
        pause = min(MIN_BACKOFF_SECONDS * 2.0 ** (self.failures - 1), MAX_BACKOFF_SECONDS)
        self.ready_at, self.backoff_until = 0.0, now + pause
        return pause


class ModelManager:
    """Owns which of a worker's models have an engine."""

    def __init__(
        self, places: Mapping[str, ManagedModel], residency: EvictionPlanner, loader: Loader
    ) -> None:
        self._models, self._planner, self._loader = places, residency, loader
        self._changed, self._failed = asyncio.Event(), asyncio.Event()
        for place in places.values():
            place.server.on_change = self._notify_change

    @property
    def servers(self) -> list[ModelServer]:
        return [place.server for place in self._models.values()]

    async def close(self) -> None:
        """Stop every engine and give back its memory."""
        for pool in self.servers:
            await pool.stop_engine()

    async def preload(self) -> None:
        """Load as many models as fit, in the order given. Raises what loading raises."""
        for name, place in self._models.items():
            if self._planner.shares[name] <= self._planner.free_bytes:
                self._planner.mark_loading(name, time.monotonic())
                await self._load_engine(name, place)

    async def run(self) -> None:
        """Until cancelled; raises `EngineCrashed` or `EngineHung` when the process has to end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load_and_evict(), name="residency")
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
        """Do what is next; when to look again though nothing has changed (loop time)."""
        resting = {name for name, place in self._models.items() if place.backoff_until > now}
        busy = {name for name, place in self._models.items() if not place.server.idle}
        self._planner.observe(busy - resting, now)
        decision = self._planner.decide(now)
        for name, place in self._models.items():
            place.server.set_accepting(name not in decision.draining | resting)
        if decision.load:
            await self._load(decision.load)
        elif decision.evict:
            await self._evict(decision.evict)
        else:
            ends = [self._models[name].backoff_until for name in resting]
            again = min([decision.next_check_at, *ends])
            return (
                None if again == float("inf") else asyncio.get_running_loop().time() + again - now
            )
        return 0.0

    async def _load(self, name: str) -> None:
        place = self._models[name]
        self._planner.mark_loading(name, time.monotonic())
        try:
            await self._load_engine(name, place)
        except Exception as error:  # of files, of memory, of the model's code: try again later
            self._planner.mark_closed(name)
            pause = place.record_failure(time.monotonic())
            place.server.set_accepting(False)
            log.exception("model_not_loaded", model=name, retry_after_seconds=pause)
            del error
            await place.server.release_all()

    async def _load_engine(self, name: str, place: ManagedModel) -> None:
        engine = await self._loader.load(place.model, place.version, place.memory_bytes)
        place.server.attach_engine(engine)
        place.ready_at = time.monotonic()
        self._planner.mark_ready(name, place.ready_at)

    async def _evict(self, name: str) -> None:
        place = self._models[name]
        loaded = time.monotonic() - place.ready_at
        await place.server.stop_engine()
        self._planner.mark_closed(name)
        log.info("model_closed", model=name, loaded_seconds=round(loaded, 1))

    def _back_off_crashed(self) -> None:
        """Have those whose engine has crashed rest for a while."""
        for name, place in self._models.items():
            if place.server.failure and name in self._planner.loaded:
                self._planner.mark_closed(name)
                pause = place.record_failure(time.monotonic())
                log.warning("engine_backoff", model=name, retry_after_seconds=pause)

    async def _raise_when_fatal(self) -> None:
        while not (failure := self._find_fatal_failure()):
            self._failed.clear()
            await self._failed.wait()
        await asyncio.gather(*(pool.drain(lambda: 0.0) for pool in self.servers))
        raise failure

    def _find_fatal_failure(self) -> EngineCrashed | EngineHung | None:
        for place in self._models.values():
            failure = place.server.failure
            if isinstance(failure, EngineHung) or (failure and failure.device_lost):
                return failure
            if failure and len(self._models) == 1:
                return failure
        return None

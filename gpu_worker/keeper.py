"""Keeps a worker's engines: loads and closes what `Residency` decides, and what engines fail at.

An engine that has crashed, or could not be loaded, is tried again after a pause that doubles; the
worker's other models go on. What cannot be mended in this process ends it: a hung step, a device
that is lost, and the crash of the only engine, for which a new process is the cleaner start.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from gpu_worker.driver import EngineCrashed
from gpu_worker.loading import Loader
from gpu_worker.pool import Pool
from gpu_worker.residency import Residency
from gpu_worker.watch import EngineHung
from registry.models import Model, Version

log = structlog.get_logger()

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
STEADY_SECONDS = 30.0  # an engine that lived this long has not failed in a row


@dataclass
class Place:
    """One model of the worker, with or without an engine."""

    pool: Pool
    model: Model
    version: Version
    memory_bytes: int | None
    ready_at: float = 0.0
    failures: int = 0  # in a row
    rests_until: float = 0.0

    def failed(self, now: float) -> float:
        """Count a failure; the seconds until the next try."""
        steady = self.ready_at and now - self.ready_at > STEADY_SECONDS
        self.failures = 1 if steady else self.failures + 1
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** (self.failures - 1), LONGEST_PAUSE_SECONDS)
        self.ready_at, self.rests_until = 0.0, now + pause
        return pause


class Keeper:
    """Owns which of a worker's models have an engine."""

    def __init__(self, places: Mapping[str, Place], residency: Residency, loader: Loader) -> None:
        self._places, self._residency, self._loader = places, residency, loader
        self._changed, self._failed = asyncio.Event(), asyncio.Event()
        for place in places.values():
            place.pool.stirred = self._stir

    @property
    def pools(self) -> list[Pool]:
        return [place.pool for place in self._places.values()]

    async def close(self) -> None:
        """Stop every engine and give back its memory."""
        for pool in self.pools:
            await pool.take()

    async def preload(self) -> None:
        """Load as many models as fit, in the order given. Raises what loading raises."""
        for name, place in self._places.items():
            if self._residency.shares[name] <= self._residency.free_bytes:
                self._residency.loading(name, time.monotonic())
                await self._put(name, place)

    async def run(self) -> None:
        """Until cancelled; raises `EngineCrashed` or `EngineHung` when the process has to end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_turns(), name="residency")
            tasks.create_task(self._end_if_fatal(), name="failures")

    def _stir(self) -> None:
        self._changed.set()
        self._failed.set()

    async def _take_turns(self) -> None:
        while True:
            self._changed.clear()
            self._mourn()
            again_at = await self._turn(time.monotonic())
            try:
                async with asyncio.timeout_at(again_at):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _turn(self, now: float) -> float | None:
        """Do what is next; when to look again though nothing has changed (loop time)."""
        resting = {name for name, place in self._places.items() if place.rests_until > now}
        busy = {name for name, place in self._places.items() if not place.pool.idle}
        self._residency.observe(busy - resting, now)
        decision = self._residency.decide(now)
        for name, place in self._places.items():
            place.pool.open(name not in decision.leaving | resting)
        if decision.load:
            await self._load(decision.load)
        elif decision.close:
            await self._close(decision.close)
        else:
            ends = [self._places[name].rests_until for name in resting]
            again = min([decision.again_at, *ends])
            return (
                None if again == float("inf") else asyncio.get_running_loop().time() + again - now
            )
        return 0.0

    async def _load(self, name: str) -> None:
        place = self._places[name]
        self._residency.loading(name, time.monotonic())
        try:
            await self._put(name, place)
        except Exception as error:  # of files, of memory, of the model's code: try again later
            self._residency.closed(name)
            pause = place.failed(time.monotonic())
            place.pool.open(False)
            log.exception("model_not_loaded", model=name, retry_after_seconds=pause)
            del error
            await place.pool.release()

    async def _put(self, name: str, place: Place) -> None:
        engine = await self._loader.load(place.model, place.version, place.memory_bytes)
        place.pool.put(engine)
        place.ready_at = time.monotonic()
        self._residency.ready(name, place.ready_at)

    async def _close(self, name: str) -> None:
        place = self._places[name]
        loaded = time.monotonic() - place.ready_at
        await place.pool.take()
        self._residency.closed(name)
        log.info("model_closed", model=name, loaded_seconds=round(loaded, 1))

    def _mourn(self) -> None:
        """Have those whose engine has crashed rest for a while."""
        for name, place in self._places.items():
            if place.pool.failure and name in self._residency.loaded:
                self._residency.closed(name)
                pause = place.failed(time.monotonic())
                log.warning("engine_rests", model=name, retry_after_seconds=pause)

    async def _end_if_fatal(self) -> None:
        while not (failure := self._fatal()):
            self._failed.clear()
            await self._failed.wait()
        await asyncio.gather(*(pool.drain(lambda: 0.0) for pool in self.pools))
        raise failure

    def _fatal(self) -> EngineCrashed | EngineHung | None:
        for place in self._places.values():
            failure = place.pool.failure
            if isinstance(failure, EngineHung) or (failure and failure.device_lost):
                return failure
            if failure and len(self._places) == 1:
                return failure
        return None

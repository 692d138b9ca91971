"""Holds the engine of one model version, which may be absent; sequences wait here for it."""

from gpu_worker.compute_meter import ModelMeter
from gpu_worker.engines.driver import Deliver, Driver
from gpu_worker.engines.engine import Engine, Sequence


class EngineHolder:
    """The place of one model version's engine, which may be empty; takes sequences in either case.

    Sequences that come while there is no engine wait for the next one. `driver` runs the engine;
    None while there is none. All methods are for one event loop, on which `deliver` is called with
    the engine's outputs. `meter` counts the time of its steps.
    """

    def __init__(self, deliver: Deliver, name: str, meter: ModelMeter) -> None:
        self._deliver, self._name, self._meter = deliver, name, meter
        self._waiting: dict[str, Sequence] = {}
        self.driver: Driver | None = None

    def attach(self, engine: Engine) -> Driver:
        """Start an engine in its thread, give it the waiting sequences in order, return its driver.

        There must be no engine yet. Returns at once.
        """
        assert self.driver is None, f"{self._name} has an engine"
        self.driver = Driver(engine, self._deliver, self._name, self._meter)
        for sequence in self._waiting.values():
            self.driver.add(sequence)
        self._waiting.clear()
        return self.driver

    async def stop(self) -> None:
        """Stop the engine after its current step, and return when its memory is free.

        Sequences in the engine are lost without an output; waiting ones stay. Without an engine
        this does nothing.
        """
        if driver := self.abandon():
            await driver.stop()

    def abandon(self) -> Driver | None:
        """Detach the engine without stopping it; none of its outputs is delivered any more.

        Returns its driver at once, or None if there is no engine.
        """
        driver, self.driver = self.driver, None
        if driver:
            driver.abandon()
        return driver

    def add(self, sequence: Sequence) -> None:
        """Give a sequence to the engine, or keep it until there is one; returns at once."""
        if self.driver:
            self.driver.add(sequence)
        else:
            self._waiting[sequence.request_id] = sequence

    def cancel(self, request_id: str) -> None:
        """Drop a request; returns at once. Idempotent.

        If the engine has it, its `cancelled` output is delivered later. One that waits for an
        engine is removed without an output.
        """
        self._waiting.pop(request_id, None)
        if self.driver:
            self.driver.cancel(request_id)

    async def cancel_and_wait(self, request_id: str) -> None:
        """Drop a request, and wait until no output of it can be delivered any more.

        That takes until the end of the engine's current step, and no time without an engine.
        """
        self._waiting.pop(request_id, None)
        if self.driver:
            await self.driver.cancel_and_wait(request_id)

"""Holds the engine of one model version, which may be absent; sequences wait here for it."""

from gpu_worker.engines.driver import Deliver, Driver
from gpu_worker.engines.engine import Engine, Sequence


class EngineHolder:
    """Takes sequences whether or not an engine is loaded. For one event loop."""

    def __init__(self, deliver: Deliver, name: str) -> None:
        self._deliver, self._name = deliver, name
        self._waiting: dict[str, Sequence] = {}
        self.driver: Driver | None = None

    def attach(self, engine: Engine) -> Driver:
        """Run an engine and give it the sequences that have waited, in order."""
        assert self.driver is None, f"{self._name} has an engine"
        self.driver = Driver(engine, self._deliver, self._name)
        for sequence in self._waiting.values():
            self.driver.add(sequence)
        self._waiting.clear()
        return self.driver

    async def stop(self) -> None:
        """Stop the engine and free its memory; the sequences in it are lost. Idempotent."""
        if driver := self.abandon():
            await driver.stop()

    def abandon(self) -> Driver | None:
        """Detach the engine, which delivers nothing any more; returns its driver."""
        driver, self.driver = self.driver, None
        if driver:
            driver.abandon()
        return driver

    def add(self, sequence: Sequence) -> None:
        """Give a sequence to the engine, or keep it until there is one."""
        if self.driver:
            self.driver.add(sequence)
        else:
            self._waiting[sequence.request_id] = sequence

    def cancel(self, request_id: str) -> None:
        """Drop a request. The engine answers with an output; a waiting one has none. Idempotent."""
        self._waiting.pop(request_id, None)
        if self.driver:
            self.driver.cancel(request_id)

    async def cancel_and_wait(self, request_id: str) -> None:
        """Drop a request, and wait until no output of it can be delivered any more."""
        self._waiting.pop(request_id, None)
        if self.driver:
            await self.driver.cancel_and_wait(request_id)

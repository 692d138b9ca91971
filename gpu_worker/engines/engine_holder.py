"""Where a pool's engine runs while there is one; sequences that come earlier wait here for it."""

from gpu_worker.engines.driver import Deliver, Driver
from gpu_worker.engines.engine import Engine, Sequence


class EngineHolder:
    """An engine comes, runs, and goes; attempts need not know. For one event loop."""

    def __init__(self, deliver: Deliver, name: str) -> None:
        self._deliver, self._name = deliver, name
        self._waiting: dict[str, Sequence] = {}
        self.driver: Driver | None = None

    def attach(self, engine: Engine) -> Driver:
        """Run an engine; it takes what has waited, in order."""
        assert self.driver is None, f"{self._name} has an engine"
        self.driver = Driver(engine, self._deliver, self._name)
        for sequence in self._waiting.values():
            self.driver.add(sequence)
        self._waiting.clear()
        return self.driver

    async def stop(self) -> None:
        """Stop the engine and give back its memory; what it held is lost. Idempotent."""
        if driver := self.abandon():
            await driver.stop()

    def abandon(self) -> Driver | None:
        """There is no engine any more: nobody waits for it, and it delivers nothing."""
        driver, self.driver = self.driver, None
        if driver:
            driver.abandon()
        return driver

    def add(self, sequence: Sequence) -> None:
        if self.driver:
            self.driver.add(sequence)
        else:
            self._waiting[sequence.request_id] = sequence

    def cancel(self, request_id: str) -> None:
        """Idempotent. An engine answers with an output, the waiting room does not."""
        self._waiting.pop(request_id, None)
        if self.driver:
            self.driver.cancel(request_id)

    async def cancel_and_wait(self, request_id: str) -> None:
        """`cancel`, and wait until nothing of it can be delivered any more."""
        self._waiting.pop(request_id, None)
        if self.driver:
            await self.driver.cancel_and_wait(request_id)

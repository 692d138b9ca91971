"""Watching an engine: it crashes, hangs, or ends as it should."""

import asyncio

from gpu_worker.engines.driver import Driver, EngineCrashed
from streams.errors import MillstreamError


class EngineHung(MillstreamError):
    """A step does not end. Its thread cannot be ended either, so the process has to."""

    def __init__(self, model: str, seconds: float) -> None:
        super().__init__(f"the engine of {model} has been in one step for {seconds:.0f} s")
        self.model, self.seconds = model, seconds


async def wait_for_failure(
    driver: Driver, model: str, timeout_seconds: float
) -> EngineCrashed | EngineHung | None:
    """How the engine has failed, as soon as it has; None when it has ended."""
    ends = {driver.crashed, driver.closed}
    while True:
        done, _ = await asyncio.wait(
            ends, timeout=timeout_seconds / 4, return_when=asyncio.FIRST_COMPLETED
        )
        if driver.crashed in done:
            error = driver.crashed.exception()
            assert isinstance(error, EngineCrashed)
            return error
        if done:
            return None
        if (seconds := driver.seconds_in_step()) > timeout_seconds:
            return EngineHung(model, seconds)

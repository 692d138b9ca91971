"""Watches an engine for a crash or a step that does not end."""

import asyncio

from gpu_worker.engines.driver import Driver, EngineCrashed
from streams.errors import MillstreamError


class EngineHung(MillstreamError):
    """A step of an engine does not end. Its thread cannot be stopped, so the process has to end."""

    def __init__(self, model: str, seconds: float) -> None:
        super().__init__(f"the engine of {model} has been in one step for {seconds:.0f} s")
        self.model, self.seconds = model, seconds


async def wait_for_failure(
    driver: Driver, model: str, timeout_seconds: float
) -> EngineCrashed | EngineHung | None:
    """Wait until the engine fails, and return its failure; None if it was closed instead.

    A step that takes longer than `timeout_seconds` counts as hung, which is noticed up to a quarter
    of that time later. The failure is returned, never raised.
    """
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

"""Retries and timeouts: for a broker that does not answer, and for tasks that do not end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from streams.broker.countdown import running_timeout
from streams.errors import BrokerUnavailable

T = TypeVar("T")
log = structlog.get_logger()
PAUSE_SECONDS = 0.25


@asynccontextmanager
async def broker_timeout(seconds: float) -> AsyncIterator[None]:
    """Cancel the `async with` block after `seconds` and raise `BrokerUnavailable`.

    Time in which this process stood still does not count. A TimeoutError that the block itself
    raises becomes `BrokerUnavailable`, too.
    """
    try:
        async with running_timeout(seconds):
            yield
    except TimeoutError:
        raise BrokerUnavailable(f"NATS did not answer within {seconds:g} s") from None


async def retry_forever(act: Callable[[], Awaitable[T]]) -> T:
    """Call `act` until it does not raise `BrokerUnavailable`, and return its result.

    Pauses `PAUSE_SECONDS` between calls and logs each new reason. Other errors of `act` are raised.
    """
    logged = ""
    while True:
        try:
            return await act()
        except BrokerUnavailable as error:
            if str(error) != logged:
                logged = str(error)
                log.warning("broker_retry", reason=logged)
            await asyncio.sleep(PAUSE_SECONDS)


async def retry_for(seconds: float, act: Callable[[], Awaitable[T]]) -> T:
    """Do as `retry_forever`, but give up after `seconds` and raise `BrokerUnavailable`.

    A call of `act` that is running then is cancelled.
    """
    async with broker_timeout(seconds):
        return await retry_forever(act)


async def wait_for_tasks(tasks: Iterable[asyncio.Task[None]], seconds: float) -> None:
    """Wait until all tasks have ended, in whatever way, but for at most `seconds`.

    Their errors are not raised. Tasks that are still running then are left running.
    """
    if waiting := set(tasks):
        await asyncio.wait(waiting, timeout=seconds)

"""How long to wait: for a broker that does not answer, for tasks that do not end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import structlog

from streams.errors import BrokerUnavailable

T = TypeVar("T")
log = structlog.get_logger()
PAUSE_SECONDS = 0.25


@asynccontextmanager
async def broker_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises `BrokerUnavailable` when what is inside takes longer, however many steps it has."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise BrokerUnavailable(f"NATS did not answer within {seconds:g} s") from None


async def retry_forever(act: Callable[[], Awaitable[T]]) -> T:
    """What `act` returns, asked again and again while it raises `BrokerUnavailable`."""
    told = ""
    while True:
        try:
            return await act()
        except BrokerUnavailable as error:
            if str(error) != told:
                told = str(error)
                log.warning("broker_retry", reason=told)
            await asyncio.sleep(PAUSE_SECONDS)


async def retry_for(seconds: float, act: Callable[[], Awaitable[T]]) -> T:
    """`persistently`, but raises `BrokerUnavailable` after so long."""
    async with broker_timeout(seconds):
        return await retry_forever(act)


async def wait_for_tasks(tasks: Iterable[asyncio.Task[None]], seconds: float) -> None:
    """Wait until all have ended, however that was, or so long."""
    if waiting := set(tasks):
        await asyncio.wait(waiting, timeout=seconds)

"""Time in which the loop stood still does not count, and time that it ran does."""

import asyncio
import time

import pytest

from streams.broker.countdown import Countdown, running_timeout
from tests.support.blocked_loop import block_loop

STALL_SECONDS = 0.7


async def test_a_stall_does_not_use_up_a_timeout() -> None:
    """What arrived meanwhile is read first."""
    answered = asyncio.Event()

    async def wait() -> None:
        async with running_timeout(0.5):
            await answered.wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    block_loop(STALL_SECONDS)
    # as the answer to a question is: read from the socket in one turn of the loop, heard in others
    asyncio.get_running_loop().call_later(0.01, answered.set)
    await waiting


async def test_a_timeout_ends_what_does_not_come() -> None:
    with pytest.raises(TimeoutError):
        async with running_timeout(0.25):
            await asyncio.Event().wait()


async def test_a_stall_in_the_last_tick_is_followed_by_another_tick() -> None:
    """Else the answers that came in the stall would come too late."""
    ended: list[float] = []
    began = time.monotonic()
    Countdown(0.05, lambda: ended.append(time.monotonic()))
    await asyncio.sleep(0)
    block_loop(STALL_SECONDS)
    await asyncio.sleep(0)
    assert not ended
    while not ended:
        await asyncio.sleep(0.01)
    assert ended[0] - began > STALL_SECONDS


async def test_a_loop_that_is_always_late_still_sees_time_pass() -> None:
    """A tick counts as one however long it took: nobody waits for ever on a busy machine."""
    countdown = Countdown(0.5)
    for _ in range(4):
        block_loop(0.3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert countdown.seconds_left < 0.3
    countdown.close()


async def test_a_cancelled_block_is_cancelled_not_timed_out() -> None:
    async def wait() -> None:
        async with running_timeout(60):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

"""The bytes of what is under way: waited for while they are too many."""

import asyncio

from gateway.entrypoints.byte_budget import ByteBudget


async def test_a_full_one_is_waited_for_until_something_is_done() -> None:
    """One thing may be larger than the limit: it is under way alone."""
    weight = ByteBudget(10)
    weight.add(5)
    await weight.wait_for_room()
    weight.add(100)
    waiting = asyncio.ensure_future(weight.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    weight.remove(100)
    await waiting

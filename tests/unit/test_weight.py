"""The bytes of what is under way: waited for while they are too many."""

import asyncio

from gateway.weight import Weight


async def test_a_full_one_is_waited_for_until_something_is_done() -> None:
    """One thing may be larger than the limit: it is under way alone."""
    weight = Weight(10)
    weight.add(5)
    await weight.room()
    weight.add(100)
    waiting = asyncio.ensure_future(weight.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    weight.remove(100)
    await waiting

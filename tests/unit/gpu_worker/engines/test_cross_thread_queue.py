"""The outbox: everything in order, and never more than it is made for."""

import asyncio

from gpu_worker.engines.remote.cross_thread_queue import MAX_ITEMS, CrossThreadQueue
from tests.support.eventually import eventually


async def test_a_reader_that_stands_still_stops_the_writer() -> None:
    """Memory is bounded; nothing is lost, and the order is kept."""
    outbox: CrossThreadQueue[int] = CrossThreadQueue()
    written = 0

    async def write() -> None:
        nonlocal written
        for number in range(2 * MAX_ITEMS + 1):
            await outbox.put(number)
            written += 1

    writing = asyncio.create_task(write())
    await eventually(lambda: written >= MAX_ITEMS)
    await asyncio.sleep(0)
    assert written == MAX_ITEMS
    taken = await asyncio.to_thread(outbox.get_all, 0)
    while not writing.done() or len(taken) <= 2 * MAX_ITEMS:
        taken += await asyncio.to_thread(outbox.get_all, 0.01)
    assert taken == [*range(2 * MAX_ITEMS + 1)]


async def test_a_take_that_missed_the_last_item_wakes_the_writer_all_the_same() -> None:
    """The loop may fill the queue while the other thread is about to take what it has counted."""
    outbox: CrossThreadQueue[int] = CrossThreadQueue()
    for number in range(MAX_ITEMS):
        await outbox.put(number)
    writing = asyncio.create_task(outbox.put(MAX_ITEMS))
    await asyncio.sleep(0)
    outbox._items.popleft()  # as if `take` had found one item less than the writer did
    assert len(outbox.get_all(0)) == MAX_ITEMS - 1
    await eventually(writing.done)

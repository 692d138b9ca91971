"""The outbox: everything in order, and never more than it is made for."""

import asyncio

from gpu_worker.engines.remote.outbox import SIZE, Outbox
from tests.eventually import eventually


async def test_a_reader_that_stands_still_stops_the_writer() -> None:
    """Memory is bounded; nothing is lost, and the order is kept."""
    outbox: Outbox[int] = Outbox()
    written = 0

    async def write() -> None:
        nonlocal written
        for number in range(2 * SIZE + 1):
            await outbox.put(number)
            written += 1

    writing = asyncio.create_task(write())
    await eventually(lambda: written >= SIZE)
    await asyncio.sleep(0)
    assert written == SIZE
    taken = await asyncio.to_thread(outbox.take, 0)
    while not writing.done() or len(taken) <= 2 * SIZE:
        taken += await asyncio.to_thread(outbox.take, 0.01)
    assert taken == [*range(2 * SIZE + 1)]


async def test_a_take_that_missed_the_last_item_wakes_the_writer_all_the_same() -> None:
    """The loop may fill the queue while the other thread is about to take what it has counted."""
    outbox: Outbox[int] = Outbox()
    for number in range(SIZE):
        await outbox.put(number)
    writing = asyncio.create_task(outbox.put(SIZE))
    await asyncio.sleep(0)
    outbox._items.popleft()  # as if `take` had found one item less than the writer did
    assert len(outbox.take(0)) == SIZE - 1
    await eventually(writing.done)

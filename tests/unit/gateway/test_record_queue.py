"""Records to iterate over: in order, bounded by bytes, and an end when the client leaves."""

import asyncio

import pytest

from gateway.replies import record_queue as module
from gateway.replies.record_queue import ClientGone, RecordQueue
from streams.errors import Ended
from streams.messages import Record


def record(index: int) -> Record:
    return {"type": "chunk", "index": index}


async def test_records_come_in_order_and_are_waited_for() -> None:
    """What is there at once is had at once; what is not is waited for."""
    reader = RecordQueue(lambda: None)
    waiting = asyncio.ensure_future(reader.next())
    await asyncio.sleep(0)
    for i in range(3):
        reader.put(record(i), 10)
    assert await waiting == record(0)
    assert [reader.next_nowait(), reader.next_nowait(), reader.next_nowait()] == [
        record(1),
        record(2),
        None,
    ]


async def test_a_full_one_asks_to_pause_until_half_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is bounded by bytes; feeding goes on when there is room for more than one record."""
    monkeypatch.setattr(module, "LIMIT_BYTES", 100)
    monkeypatch.setattr(module, "OVERHEAD_BYTES", 0)
    drained: list[bool] = []
    reader = RecordQueue(lambda: drained.append(True))
    assert [reader.put(record(i), 40) for i in range(4)] == [True, True, False, False]
    for _ in range(2):
        await reader.next()
        assert not drained
    await reader.next()
    assert drained == [True]
    assert reader.put(record(4), 40)


async def test_a_client_that_leaves_ends_the_waiting() -> None:
    """Nobody works on for who is gone, whatever is still there."""
    reader = RecordQueue(lambda: None)
    waiting = asyncio.ensure_future(reader.next())
    await asyncio.sleep(0)
    reader.close(ClientGone())
    with pytest.raises(ClientGone):
        await waiting
    reader.put(record(0), 10)
    with pytest.raises(ClientGone):
        await reader.next()


async def test_what_is_here_comes_before_the_reason_for_the_end() -> None:
    """An answer that is complete is not cut for a gateway that ends."""
    reader = RecordQueue(lambda: None)
    reader.put(record(0), 10)
    reader.close(Ended("overloaded", "this gateway is shutting down"))
    reader.put(record(1), 10)
    assert await reader.next() == record(0)
    with pytest.raises(Ended, match="shutting down"):
        await reader.next()

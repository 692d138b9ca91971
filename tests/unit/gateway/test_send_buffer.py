"""Frames for one socket: in order, bounded by bytes, written by one task."""

import asyncio
import tracemalloc
from sys import getsizeof

import pytest

from api.schemas.parsing import Encoding
from gateway.entrypoints.websocket import ENCODERS
from gateway.replies import send_buffer
from gateway.replies.send_buffer import OVERHEAD_BYTES, EncodedFrame, SendBuffer
from tests.support.eventually import eventually


class Client:
    """A socket that takes frames while `reads` is set."""

    def __init__(self) -> None:
        self.got: list[EncodedFrame] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def write(self, frame: EncodedFrame) -> None:
        await self.reads.wait()
        self.got.append(frame)


async def test_frames_are_written_in_order_and_the_last_one_too() -> None:
    """`end` lets everything out that was put before it."""
    client, waiting = Client(), SendBuffer(lambda: None)
    frames: list[EncodedFrame] = [str(i) for i in range(1000)]
    for frame in frames:
        assert waiting.put(frame)
    waiting.finish()
    await waiting.run(client.write)
    assert client.got == frames


async def test_a_full_one_asks_to_pause_until_half_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Feeding it again at each frame would wake everybody for nothing."""
    frame = "x" * 10
    monkeypatch.setattr(send_buffer, "LIMIT_BYTES", 10 * (getsizeof(frame) + OVERHEAD_BYTES))
    drained: list[int] = []
    client = Client()
    waiting = SendBuffer(lambda: drained.append(len(client.got)))
    client.reads.clear()
    wanted = [waiting.put(frame) for _ in range(12)]
    assert wanted == [True] * 10 + [False] * 2
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(waiting.run(client.write))
        room = tasks.create_task(waiting.wait_for_room())
        await asyncio.sleep(0)
        assert not room.done()
        client.reads.set()
        await room
        await eventually(lambda: len(client.got) == 12)
        writing.cancel()
    assert drained == [8]
    assert waiting.put("more")


async def test_one_frame_may_be_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is on what waits, not on what may be said."""
    monkeypatch.setattr(send_buffer, "LIMIT_BYTES", 100)
    drained: list[bool] = []
    client, waiting = Client(), SendBuffer(lambda: drained.append(True))
    assert not waiting.put(b"x" * 1000)
    waiting.finish()
    await waiting.run(client.write)
    assert client.got == [b"x" * 1000]
    assert drained == [True]


@pytest.mark.parametrize("text", ["mill", "磨", "🌊"])
@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_frame_that_waits_takes_no_more_memory_than_is_counted(
    encoding: Encoding, text: str
) -> None:
    """An encoder's spare room would be many times what a token needs."""
    frame = {"type": "chunk", "id": "1", "index": 0, "count": 1, "text": text}
    tracemalloc.start()
    try:
        waiting = [ENCODERS[encoding](frame) for _ in range(1000)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1.2 * sum(getsizeof(each) + OVERHEAD_BYTES for each in waiting)

"""The pull loop: one pull at a time, whatever happens to the broker and the consumer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.js.errors import NotFoundError

from streams import subjects, topology
from streams.broker import declaration, pull_loop
from streams.broker.broker_client import Broker
from streams.broker.pull_loop import Delivery, PullLoop
from streams.subjects import PoolKey, Priority
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer

POOL = PoolKey("m", "1", Priority.STANDARD)
CONSUMER = topology.work_consumer(POOL, 1)
NAME = str(CONSUMER.durable_name)


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as broker:
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        await declaration.declare_consumer(broker, topology.WORK, CONSUMER)
        yield broker


class Taker:
    """Takes and acknowledges; has room for `room` more."""

    def __init__(self, broker: Broker, room: int = 1000) -> None:
        self.room = room
        self.taken: list[bytes] = []
        self.pull = PullLoop(broker, topology.WORK, NAME, lambda: self.room, self.take)
        self._acks: set[asyncio.Task[None]] = set()

    def take(self, delivery: Delivery) -> None:
        self.taken.append(delivery.data)
        self.room -= 1
        self._acks.add(asyncio.create_task(delivery.ack()))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.pull.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
        assert task.cancelled(), task.exception()


async def put(broker: Broker, *payloads: bytes) -> None:
    for payload in payloads:
        await broker.store_retrying(subjects.work(POOL), payload, {}, 20)


async def test_a_message_may_have_a_status_of_its_own(broker: Broker) -> None:
    """A writer chooses its headers: none hides what comes behind, nor ends a pull."""
    taker = Taker(broker)
    async with taker.running():
        for status in ("100", "204", "404", "409"):
            await broker.store(subjects.work(POOL), status.encode(), {"Status": status})
        await eventually(lambda: len(taker.taken) == 4)
    record = subjects.dead("acme", "m")
    for status in ("100", "204", "404"):
        await broker.store(record, status.encode(), {"Status": status})
    found = await broker.read_subject(topology.DEAD, record)
    assert [message.data for message in found] == [b"100", b"204", b"404"]


async def waiting(broker: Broker) -> int:
    """Pulls that the broker knows of."""
    info = await broker.js.consumer_info(topology.WORK, NAME)
    return int(info.num_waiting)


async def test_no_more_is_asked_for_than_there_is_room(broker: Broker) -> None:
    """Whatever a worker cannot run waits in the broker, where others can have it."""
    await put(broker, *(bytes([i]) for i in range(10)))
    taker = Taker(broker, room=3)
    async with taker.running():
        await eventually(lambda: len(taker.taken) == 3)
        assert await waiting(broker) == 0
        taker.room = 2
        taker.pull.wake()
        await eventually(lambda: len(taker.taken) == 5)


async def test_there_is_one_pull_at_a_time(broker: Broker) -> None:
    """Each takes one of 512 places at the consumer, and two would bring twice the room."""
    taker = Taker(broker)
    most = 0

    async def all_taken() -> bool:
        nonlocal most
        most = max(most, await waiting(broker))
        taker.pull.wake()
        return len(taker.taken) == 300

    async with taker.running():
        putting = asyncio.create_task(put(broker, *(b"%d" % i for i in range(300))))
        await eventually(all_taken)
        await putting
    assert most == 1
    assert taker.taken == [b"%d" % i for i in range(300)]


async def test_a_pull_that_stopped_leaves_none_behind(broker: Broker) -> None:
    """The broker would send it what nobody takes; that waits for the ack wait then."""
    async with Taker(broker).running():
        await eventually(lambda: waiting(broker))
    taker = Taker(broker)
    async with taker.running():
        await put(broker, b"x")
        await eventually(lambda: taker.taken)
    info = await broker.js.consumer_info(topology.WORK, NAME)
    assert info.delivered.consumer_seq == 1


async def test_it_survives_a_restart_of_the_broker(broker: Broker, nats_server: NatsServer) -> None:
    """Its pull is forgotten there; the consumer is on disk."""
    taker = Taker(broker)
    async with taker.running():
        await put(broker, b"before")
        await eventually(lambda: taker.taken == [b"before"])
        nats_server.restart()
        await put(broker, b"after")
        await eventually(lambda: b"after" in taker.taken)
        assert await waiting(broker) == 1


async def test_it_survives_a_frozen_broker(
    broker: Broker, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No heartbeat comes: the pull counts as lost, and a lost pull brings nothing any more."""
    monkeypatch.setattr(pull_loop, "_SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(pull_loop, "HEARTBEAT_SECONDS", 0.1)
    taker = Taker(broker)
    async with taker.running():
        await eventually(lambda: waiting(broker))
        lost = taker.pull._pull_number
        nats_server.freeze()
        await eventually(lambda: taker.pull._is_lost or taker.pull._pull_number > lost)
        nats_server.thaw()
        await put(broker, *(bytes([i]) for i in range(20)))
        await eventually(lambda: len(taker.taken) == 20)

        async def one_left() -> bool:
            return await waiting(broker) == 1

        await eventually(one_left)


async def test_it_survives_that_its_consumer_is_deleted_and_made_again(broker: Broker) -> None:
    """A new leader of the stream, or an operator, may take it away for a moment."""
    taker = Taker(broker)
    async with taker.running():
        await eventually(lambda: waiting(broker))
        await broker.js.delete_consumer(topology.WORK, NAME)
        with pytest.raises(NotFoundError):
            await waiting(broker)
        await put(broker, b"x")
        await declaration.declare_consumer(broker, topology.WORK, CONSUMER)
        await eventually(lambda: taker.taken == [b"x"])

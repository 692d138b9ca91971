"""Streams and consumers are declared by whoever comes, and stay as they were declared last."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, RetentionPolicy

from streams import topology
from streams.broker import broker_client, declaration
from streams.broker.broker_client import Broker, StoreRefused
from streams.broker.declaration import TopologyMismatch
from streams.errors import BrokerUnavailable
from streams.topology import Scale
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer

REQUEST = "infer.request.acme.m.standard"


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as broker:
        yield broker


async def declare(broker: Broker, max_queued: int) -> int:
    return await declaration.declare(broker, Scale(), max_queued)


async def lane_limit(broker: Broker) -> int:
    info = await broker.js.stream_info(topology.REQUESTS)
    return int(info.config.max_msgs_per_subject)


async def test_a_lower_limit_deletes_nothing_that_was_accepted(broker: Broker) -> None:
    """The broker would drop the oldest requests of a lane; lower limits are the gateways' part."""
    await declare(broker, 5)
    for i in range(5):
        await broker.store(REQUEST, b"x", {"Nats-Msg-Id": str(i)})
    assert await declare(broker, 2) == 5
    assert len(await broker.read_subject(topology.REQUESTS, REQUEST)) == 5


async def test_a_higher_limit_is_reconciled(broker: Broker) -> None:
    """A tenant's limit may grow while requests wait."""
    await declare(broker, 1)
    await broker.store(REQUEST, b"x", {"Nats-Msg-Id": "1"})
    with pytest.raises(StoreRefused):
        await broker.store(REQUEST, b"x", {"Nats-Msg-Id": "2"})
    assert await declare(broker, 2) == 2
    await broker.store(REQUEST, b"x", {"Nats-Msg-Id": "2"})


async def test_several_services_may_declare_at_once(nats_url: str, broker: Broker) -> None:
    """They start together; the streams are there afterwards, with the higher limit."""
    async with connect(nats_url, "other") as other:
        await asyncio.gather(*(declare(each, i) for i in (3, 4) for each in (broker, other)))
    assert await lane_limit(broker) == 4


async def test_a_broker_that_answers_late_is_asked_again(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster leaves one of two that declare at once without an answer."""
    monkeypatch.setattr(broker_client, "STORE_SECONDS", 0.1)
    async with connect(nats_server.url, "test") as broker:
        nats_server.freeze()
        declaring = asyncio.create_task(declare(broker, 5))
        await asyncio.wait({declaring}, timeout=0.5)  # longer than one answer is waited for
        nats_server.thaw()
        assert await declaring == 5


async def test_a_stream_that_cannot_become_ours_is_told_of(broker: Broker) -> None:
    """An operator must look: what is in it may matter to somebody."""
    config = next(s for s in topology.stream_configs(Scale(), 5) if s.name == topology.WORK)
    config.retention = RetentionPolicy.LIMITS
    await broker.js.add_stream(config)
    with pytest.raises(TopologyMismatch, match="WORK"):
        await declare(broker, 5)


async def test_a_stream_that_nobody_declares_is_told_of(broker: Broker) -> None:
    """A dispatcher that waits for ever says nothing of what is missing."""
    with pytest.raises(TopologyMismatch, match="REQUESTS"):
        await declaration.wait_for_stream(broker, topology.REQUESTS, seconds=0.2)


async def test_a_new_leader_gets_everything_and_its_predecessor_nothing(broker: Broker) -> None:
    """A frozen leader's pull is still with the broker, which would answer it first."""
    await declare(broker, 100)
    heard: dict[str, list[str]] = {"old": [], "new": []}

    async def pull(leader: str, consumer: str) -> None:
        async def on_message(msg: Msg) -> None:
            if msg.reply:
                heard[leader].append(msg.subject)

        await broker.subscribe(f"inbox.{leader}", on_message)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{topology.REQUESTS}.{consumer}"
        await broker.publish(
            subject, b'{"batch": 100, "expires": 20000000000}', reply=f"inbox.{leader}"
        )

    await pull("old", await declaration.replace_index_consumer(broker, "m"))
    await broker.store(REQUEST, b"x", {"Nats-Msg-Id": "1"})
    await eventually(lambda: heard["old"])
    await pull("new", await declaration.replace_index_consumer(broker, "m"))
    await broker.store(REQUEST, b"x", {"Nats-Msg-Id": "2"})
    await eventually(lambda: len(heard["new"]) == 2)
    assert len(heard["old"]) == 1


async def test_a_new_index_that_nobody_leads_is_made_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster it falls to a broker that has died; the one that was made late is removed."""
    await declare(broker, 100)
    made = list[str]()

    async def declare_consumer(
        broker: Broker, stream: str, config: ConsumerConfig, seconds: float
    ) -> None:
        await broker.js.add_consumer(stream, config)
        made.append(config.durable_name or "")
        if len(made) < 3:
            raise BrokerUnavailable(f"no answer in {seconds} s")

    monkeypatch.setattr(declaration, "declare_consumer", declare_consumer)
    assert await declaration.replace_index_consumer(broker, "m") == made[2]
    infos = await broker.js.consumers_info(topology.REQUESTS)
    assert [info.name for info in infos] == made[2:]
    monkeypatch.setattr(declaration, "_INDEX_SECONDS", (1.0,))
    made.clear()
    with pytest.raises(BrokerUnavailable, match="no index of m"):
        await declaration.replace_index_consumer(broker, "m")

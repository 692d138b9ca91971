"""The connection outlives servers that freeze, die or close it, and never keeps anybody waiting."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError, ServiceUnavailableError

from streams import topology
from streams.broker import declaration, reconnecting_client
from streams.broker.broker_client import STORE_SECONDS, Broker
from streams.errors import BrokerUnavailable
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer

DEAD = "infer.dead.acme.m"
SOON = STORE_SECONDS + 0.5


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as broker:
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        yield broker


async def stored(broker: Broker) -> bool:
    try:
        await broker.store(DEAD, b"x")
    except BrokerUnavailable:
        return False
    return True


async def test_a_frozen_server_is_noticed_and_comes_back(
    broker: Broker, nats_server: NatsServer
) -> None:
    """It keeps its connections and answers nothing; gateways must say 503 within three seconds."""
    nats_server.freeze()
    async with asyncio.timeout(SOON):
        with pytest.raises(BrokerUnavailable):
            await broker.store(DEAD, b"x")
    async with asyncio.timeout(SOON):
        with pytest.raises(BrokerUnavailable):
            await broker.read_subject(topology.DEAD, DEAD)
    async with asyncio.timeout(SOON):
        with pytest.raises(BrokerUnavailable):
            await declaration.consumer_info(broker, topology.WORK, "any")
    nats_server.thaw()
    await eventually(lambda: stored(broker))


async def test_what_only_a_leader_answers_is_asked_until_there_is_one(broker: Broker) -> None:
    refusals: list[Exception] = [TimeoutError(), ServiceUnavailableError(), TimeoutError()]

    async def ask(js: JetStreamContext) -> StreamInfo:
        if refusals:
            raise refusals.pop()
        return await js.stream_info(topology.WORK)

    assert (await broker.call_api(ask)).config.name == topology.WORK
    with pytest.raises(NotFoundError):
        await declaration.stream_info(broker, "NOWHERE")
    assert await declaration.consumer_info(broker, topology.WORK, "nobody") is None


async def test_a_frozen_server_keeps_nobody_waiting_behind_a_full_buffer(
    broker: Broker, nats_server: NatsServer
) -> None:
    """nats-py lets publishers wait for room without a limit."""
    nats_server.freeze()
    payload = bytes(100_000)
    async with asyncio.timeout(2 * SOON):
        stores = (broker.store(DEAD, payload) for _ in range(500))
        results = await asyncio.gather(*stores, return_exceptions=True)
    assert {type(result) for result in results} == {BrokerUnavailable}
    nats_server.thaw()
    await eventually(lambda: stored(broker))


async def test_a_frozen_server_is_left_for_another_one(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with a full buffer, which nats-py would want to be rid of first."""
    monkeypatch.setattr(reconnecting_client, "PING_SECONDS", 0.2)
    other = NatsServer(tmp_path)
    try:
        async with connect(nats_server.url, "test") as broker:
            broker.client._setup_server_pool([other.url])
            nats_server.freeze()
            with pytest.raises(BrokerUnavailable):
                await asyncio.gather(*(broker.store(DEAD, bytes(100_000)) for _ in range(500)))
            await eventually(lambda: broker.is_connected)
            await declaration.declare(broker, topology.Scale(), max_queued=10)
    finally:
        other.kill()


async def test_a_client_that_closed_for_good_is_replaced_with_its_subscriptions(
    broker: Broker,
) -> None:
    """A subject that is too long is a protocol error, after which nats-py stays closed."""
    heard: list[bytes] = []

    async def on_message(msg: Msg) -> None:
        heard.append(msg.data)

    await broker.subscribe("news.>", on_message)
    closed = broker.client
    await broker.publish("news." + "x" * 5000)
    await eventually(lambda: broker.client is not closed and broker.is_connected)
    await broker.publish("news.today", b"1")
    await eventually(lambda: heard)
    assert await stored(broker)
    assert heard == [b"1"]


async def test_a_client_that_closed_while_the_server_was_away_is_replaced_later(
    broker: Broker, nats_server: NatsServer
) -> None:
    """Nobody can be asked; whoever stores meanwhile is told so at once."""
    await broker.client.close()
    nats_server.kill()
    with pytest.raises(BrokerUnavailable):
        await broker.store(DEAD, b"x")
    nats_server.restart()
    await eventually(lambda: stored(broker))


async def test_a_frozen_server_does_not_keep_a_service_from_ending(
    nats_server: NatsServer,
) -> None:
    """Whoever stops it waits for that, and would have to kill it."""
    async with connect(nats_server.url, "test") as broker:
        nats_server.freeze()
        with pytest.raises(BrokerUnavailable):
            await asyncio.gather(*(broker.store(DEAD, bytes(100_000)) for _ in range(500)))
        async with asyncio.timeout(5):
            await broker.close()
    nats_server.thaw()


async def test_nobody_answering_is_an_error_not_a_silence(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command for people must end; a service is started again by its supervisor."""
    monkeypatch.setattr(reconnecting_client, "OPEN_SECONDS", 0.5)
    nats_server.kill()
    with pytest.raises(BrokerUnavailable):
        await Broker(nats_server.url, "test").open()


async def test_a_subject_is_read_to_its_end(broker: Broker) -> None:
    """A page has a thousand messages and a megabyte at most, a log may have more."""
    for start in range(0, 2496, 96):  # all at once they would wait for each other
        await asyncio.gather(*(broker.store(DEAD, b"%d" % i) for i in range(start, start + 96)))
    for _ in range(4):
        await broker.store(DEAD, bytes(400_000))
    await broker.store("infer.dead.other.m", b"other")
    found = await broker.read_subject(topology.DEAD, DEAD)
    first = found[0].seq
    assert [message.seq for message in found] == list(range(first, first + 2500))
    assert len(await broker.read_subject(topology.DEAD, DEAD, after=first + 2399)) == 100
    assert await broker.read_subject(topology.DEAD, "infer.dead.nobody.m") == []
    assert len(await broker.read_subject(topology.DEAD, "infer.dead.>")) == 2501


async def test_the_subject_of_the_last_message_is_found_by_a_pattern(broker: Broker) -> None:
    """Whoever knows but a part of it asks for it once, and reads by the whole one."""
    for subject in ("infer.dead.acme.m", "infer.dead.other.m", "infer.dead.other.n"):
        await broker.store(subject, b"x")
    assert await broker.find_subject(topology.DEAD, "infer.dead.*.m") == "infer.dead.other.m"
    assert await broker.find_subject(topology.DEAD, "infer.dead.*.o") is None


async def test_a_replica_that_does_not_answer_is_not_waited_for(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is frozen is asked as often as the others, until its cluster has noticed: one
    read of 27 meets it three times in a row.
    """
    await broker.store(DEAD, b"payload")
    offer, deaf = broker.client.try_publish_now, list[str]()

    def to_the_deaf(
        subject: str, payload: bytes, headers: Mapping[str, str] | None, reply: str
    ) -> bool:
        if len(deaf) == 4 or not subject.startswith("$JS.API.DIRECT.GET."):
            return offer(subject, payload, headers, reply)
        deaf.append(subject)
        return True

    monkeypatch.setattr(broker.client, "try_publish_now", to_the_deaf)
    assert await broker.read_subject(topology.DEAD, DEAD)
    assert len(deaf) == 4


async def test_one_message_is_read_with_its_headers_or_is_gone(broker: Broker) -> None:
    """A request that its dispatcher cannot find was sent on by another: that must be certain."""
    place = await broker.store(DEAD, b"payload", {"Reason": "late"})
    message = await broker.get(topology.DEAD, place.seq)
    assert message
    assert (message.data, message.headers["Reason"], message.subject) == (b"payload", "late", DEAD)
    assert await broker._get_from_leader(topology.DEAD, place.seq) is not None
    await broker.remove(topology.DEAD, place.seq)
    assert await broker.get(topology.DEAD, place.seq) is None


async def test_a_message_that_cannot_be_looked_for_is_not_gone(broker: Broker) -> None:
    """Who takes it for gone ends a request that is still there."""
    with pytest.raises(BrokerUnavailable):
        await broker._get_from_leader("NOT_THERE", 1)


async def test_a_message_is_removed_once(broker: Broker) -> None:
    """Whoever comes second, or asks for one that never was, learns so; neither is a failure."""
    first = await broker.store(DEAD, b"x")
    await broker.store(DEAD, b"y")
    removed = [await broker.remove(topology.DEAD, seq) for seq in (first.seq, first.seq, 99)]
    assert removed == [True, False, False]
    with pytest.raises(BrokerUnavailable):
        await broker.remove("NOWHERE", 1)


async def test_a_stream_that_does_not_exist_is_an_answer_too(broker: Broker) -> None:
    """A memory stream is gone after a restart until somebody declares it."""
    with pytest.raises(BrokerUnavailable):
        await broker.store("infer.token.9.a.b.c", b"x")
    with pytest.raises(BrokerUnavailable):
        await broker.read_subject("TOKENS_9", "infer.token.9.a.b.c")


async def test_nothing_is_kept_of_what_was_answered(broker: Broker) -> None:
    """A process stores millions of messages in its life."""
    stores = [asyncio.create_task(broker.store(DEAD, b"x")) for _ in range(50)]
    stores[0].cancel()
    await asyncio.wait(stores)
    assert len(broker._inbox) == 0


async def failure(broker: Broker, subject: str) -> "weakref.ref[BrokerUnavailable]":
    try:
        await broker.store_retrying(subject, b"x", {}, 1.0)
    except BrokerUnavailable as error:
        return weakref.ref(error)
    raise AssertionError("it was stored")


@pytest.mark.parametrize("subject", ["nobody.takes.this", DEAD])
async def test_a_failed_store_leaves_nothing_to_collect(
    broker: Broker, nats_server: NatsServer, subject: str
) -> None:
    """Thousands fail while brokers elect a leader, and each held its frames and its payload."""
    if subject == DEAD:
        nats_server.freeze()
    gc.disable()
    try:
        error = await failure(broker, subject)
        await asyncio.sleep(0)  # the loop has still had the answer in its hands
        assert error() is None
    finally:
        gc.enable()

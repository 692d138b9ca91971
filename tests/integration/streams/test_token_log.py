"""The token log against a real broker: claims fence, appends are exactly once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gpu_worker.attempt.poison_guard import PoisonGuard
from gpu_worker.attempt.start_quarantine import StartQuarantine
from streams import messages, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, PubAck, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable
from streams.headers import RESTART
from streams.records.token_log import Fenced, TokenLog, write_ledger_record
from streams.subjects import LogAddress
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer

ADDRESS = LogAddress("acme", "gw", "0a")
DONE = messages.done_record("stop", messages.openai_usage(1, 1), {})


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as broker:
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        yield broker


def log(broker: Broker) -> TokenLog:
    return TokenLog(broker, ADDRESS, shards=1)


def chunk(index: int) -> dict[str, object]:
    return {"type": "chunk", "index": index, "count": 1, "tokens": [index]}


async def test_a_later_claim_fences_the_earlier_one(broker: Broker) -> None:
    """A worker that was paused and wakes up can add nothing."""
    first, second = log(broker), log(broker)
    await first.claim("m", "1", "w1")
    await first.append(chunk(0))
    before = await second.claim("m", "1", "w2")
    assert (before.attempts, before.tokens) == (1, [0])
    with pytest.raises(Fenced):
        await first.append(chunk(1))
    await second.append(chunk(1))
    assert (await log(broker).read()).tokens == [0, 1]


async def test_a_worker_that_claims_again_makes_a_new_attempt(broker: Broker) -> None:
    """Its claim has the same bytes as before; for a lost confirmation it must not be taken."""
    await log(broker).claim("m", "1", "w")
    before = await log(broker).claim("m", "1", "w")
    assert before.attempts == 1
    assert [r["attempt"] for r in (await log(broker).read()).records] == [1, 2]


async def test_who_claims_a_log_without_its_beginning_begins_anew(broker: Broker) -> None:
    """The broker drops the oldest records when its memory is full; no worker may delete the rest.

    What is left of it is void for whoever reads the log, and for every later attempt.
    """
    second = log(broker)
    await truncate(broker)
    before = await second.claim("m", "1", "w2")
    assert before.is_truncated
    assert before.generated_tokens == 9
    await second.append(chunk(0))
    assert [messages.unpack(r)["type"] for r in second.cache.records] == ["started", "chunk"]
    assert len(await broker.read_subject(topology.token_stream_name(0), second.subject)) > 2
    found = await log(broker).read()
    assert (found.tokens, found.is_truncated) == ([0], False)
    third = log(broker)
    assert (await third.claim("m", "1", "w3")).tokens == [0]
    await third.append(chunk(1))
    found = await log(broker).read()
    assert (found.tokens, found.attempts) == ([0, 1], 2)


async def truncate(broker: Broker) -> None:
    """Write a log of which the broker drops the beginning."""
    writer = log(broker)
    await writer.claim("m", "1", "w1")
    for index in range(9):
        await writer.append(chunk(index))
    config = (await broker.js.stream_info(topology.token_stream_name(0))).config
    await broker.js.update_stream(config, max_bytes=700)


async def test_a_claim_that_begins_anew_is_made_once_though_its_confirmation_got_lost(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim and the end of what was before it are one record: there is nothing between."""
    await truncate(broker)
    store, lost = broker.store_retrying, list[str]()

    async def lose_first(
        subject: str, payload: bytes, headers: dict[str, str], seconds: float
    ) -> PubAck:
        stored = await store(subject, payload, headers, seconds)
        if headers.get(RESTART) and not lost:
            lost.append(subject)
            raise BrokerUnavailable("lost")
        return stored

    monkeypatch.setattr(broker, "store_retrying", lose_first)
    writer = log(broker)
    assert (await writer.claim("m", "1", "w2")).is_truncated
    assert lost
    await writer.append(chunk(0))
    found = await log(broker).read()
    assert ([r["type"] for r in found.records], found.attempts) == (["started", "chunk"], 1)


async def test_a_log_that_is_lost_after_it_began_anew_is_restored_from_there(
    broker: Broker,
) -> None:
    """Its writer knows nothing of what was void."""
    await truncate(broker)
    writer = log(broker)
    await writer.claim("m", "1", "w2")
    await broker.js.purge_stream(topology.token_stream_name(0))
    await writer.append(chunk(0))
    found = await log(broker).read()
    assert ([r["type"] for r in found.records], found.is_truncated) == (["started", "chunk"], False)


async def test_an_ended_log_cannot_be_claimed(broker: Broker) -> None:
    """Exactly one terminal, whoever gets the work delivered again."""
    first = log(broker)
    await first.claim("m", "1", "w1")
    await first.append(DONE)
    again = await log(broker).claim("m", "1", "w2")
    assert again.terminal == DONE
    assert (await log(broker).read()).attempts == 1


async def test_an_append_whose_confirmation_got_lost_is_not_doubled(broker: Broker) -> None:
    """The retry meets its own record and takes it for its own."""
    writer = log(broker)
    await writer.claim("m", "1", "w1")
    claimed = writer.last
    await writer.append(chunk(0))
    writer.last = claimed  # as if the confirmation had never come
    await writer.append(chunk(0))
    assert (await log(broker).read()).tokens == [0]


@pytest.mark.parametrize("code", [10071, 10164])
async def test_a_refused_append_is_not_fenced_by_what_nobody_can_read(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """In a cluster its own earlier try may be on its way still, or the replica read may be late."""
    writer, store, refused = log(broker), broker.store_retrying, list[str]()
    await writer.claim("m", "1", "w1")

    async def refuse_once(
        subject: str, payload: bytes, headers: dict[str, str], seconds: float
    ) -> PubAck:
        if refused:
            return await store(subject, payload, headers, seconds)
        refused.append(subject)
        raise StoreRefused(code, "wrong last sequence")

    monkeypatch.setattr(broker, "store_retrying", refuse_once)
    await writer.append(chunk(0))
    assert refused
    assert (await log(broker).read()).tokens == [0]


async def test_an_ended_log_is_put_back_where_it_was_lost(
    broker: Broker, nats_server: NatsServer
) -> None:
    """Whole and once, also when several miss it at the same time; twice asked is once done."""
    writer = log(broker)
    await writer.claim("m", "1", "w1")
    for record in (chunk(0), chunk(1), DONE):
        await writer.append(record)
    ended, before = writer.to_finished(), (await log(broker).read()).records
    nats_server.restart()
    await eventually(lambda: redeclared(broker))
    for _ in range(2):
        await asyncio.gather(ended.restore(), ended.restore())
        assert (await log(broker).read()).records == before


async def test_a_half_of_a_log_is_made_whole(broker: Broker) -> None:
    """Whoever puts it back may be interrupted, and is asked again."""
    writer, part = log(broker), log(broker)
    await writer.claim("m", "1", "w1")
    for record in (chunk(0), chunk(1), DONE):
        await writer.append(record)
    before = (await log(broker).read()).records
    await broker.js.purge_stream(topology.token_stream_name(0))
    for record in before[:2]:
        await part.append(record)
    await writer.to_finished().restore()
    assert (await log(broker).read()).records == before


async def redeclared(broker: Broker) -> bool:
    try:
        await declaration.declare(broker, topology.Scale(), max_queued=10)
    except BrokerUnavailable:
        return False
    return True


async def test_a_log_that_goes_on_elsewhere_is_not_put_back(broker: Broker) -> None:
    """Another attempt found it empty and began anew: that is the log now."""
    writer, other = log(broker), log(broker)
    await writer.claim("m", "1", "w1")
    await writer.append(DONE)
    await broker.js.purge_stream(topology.token_stream_name(0))
    await other.claim("m", "1", "w2")
    await writer.to_finished().restore()
    await other.append(chunk(0))
    assert [r["type"] for r in (await log(broker).read()).records] == ["started", "chunk"]


@pytest.fixture
def interrupted(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The broker does not answer when a stream is first read; the streams of which this was so."""
    read, failed = broker.read_subject, list[str]()

    async def read_subject(stream: str, subject: str, after: int = 0) -> list[StoredMessage]:
        if stream not in failed:
            failed.append(stream)
            raise BrokerUnavailable("no answer")
        return await read(stream, subject, after)

    monkeypatch.setattr(broker, "read_subject", read_subject)
    return failed


async def test_a_later_attempt_rides_out_a_broker_that_does_not_answer(
    broker: Broker, interrupted: list[str]
) -> None:
    """A leader is elected just then; who gave up would cost the request another ack wait."""
    await log(broker).claim("m", "1", "w1")
    before = await log(broker).claim("m", "1", "w2")
    assert before.attempts == 1
    standing = PoisonGuard(broker, ADDRESS, "w2", StartQuarantine())
    await standing.load_history(before)
    assert len(standing.history.attempts) == 1
    assert interrupted == [topology.token_stream_name(0), topology.ATTEMPTS]


async def test_an_append_rides_out_a_broker_restart(
    broker: Broker, nats_server: NatsServer
) -> None:
    """A file-backed ledger write waits for the broker to return."""
    record = messages.LedgerRecord("0a", "acme", "m", "1", "stop", 1, 1, 1, "w", 0, 0)
    nats_server.kill()
    await eventually(lambda: not broker.is_connected)
    writing = asyncio.create_task(write_ledger_record(broker, record))
    nats_server.restart()
    assert not (await writing).duplicate
    assert (await write_ledger_record(broker, record)).duplicate

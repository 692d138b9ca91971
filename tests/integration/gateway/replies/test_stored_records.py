"""Producers read the stored records of their own logs from gateways, page by page."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from gateway.replies.stored_records import StoredRecords
from millstream.tenants.examples.producer import read_replies, read_stored
from streams import messages, subjects, topology
from streams.accounts.access import UserClass
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.records.token_log import TokenLog
from streams.subjects import LogAddress
from tests.support.accounts_server import connect, process_files
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer

ADDRESS = LogAddress("acme", "bar", "0a")
REPLY, QUESTION = "infer.reply.acme.bar.0a", "infer.records.acme.bar.0a"
DONE = messages.done_record("stop", messages.openai_usage(1, 1), {})


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    """A connection, and two gateways that answer."""
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(connect(nats_url, "test"))
        await declaration.declare(made, topology.Scale(), max_queued=10)
        for name in ("one", "other"):
            files = process_files(nats_url, UserClass.GATEWAY, name)
            gateway = await stack.enter_async_context(connect(nats_url, name, files))
            await StoredRecords(gateway, shards=1).open()
        yield made


def chunk(index: int, size: int = 1) -> bytes:
    text = size * "x"
    place = {"index": index, "count": 1, "characters": index, "tokens": [index]}
    return messages.pack({"type": "chunk", "text": text, **place})


async def ask(broker: Broker, payload: bytes = b"", subject: str = QUESTION) -> dict[str, object]:
    answer = await broker.request(subject, payload, seconds=60)
    assert answer is not None
    found = messages.unpack(answer)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("count", "size"), [(450, 1), (5, 200_000)])
async def test_a_whole_log_is_read_in_bounded_pages(broker: Broker, count: int, size: int) -> None:
    """By number and by size; a record that is larger than that comes alone."""
    written = [chunk(index, size) for index in range(count)]
    await TokenLog(broker, ADDRESS, shards=1).append_packed(list(written))
    first = await ask(broker)
    records = first["records"]
    assert isinstance(records, list)
    assert 0 < len(records) <= 200
    assert first["remaining"] == count - len(records)
    found = [record async for _, record in read_stored(broker.client, REPLY, 0)]
    assert found == written


async def test_only_what_is_missing_is_read(broker: Broker) -> None:
    """Behind a sequence, and nothing behind the last one or of a log that is none."""
    log = TokenLog(broker, ADDRESS, shards=1)
    await log.append_packed([chunk(0), chunk(1)])
    first, last = log.last - 1, log.last
    after_first = {"records": [[last, chunk(1)]], "remaining": 0}
    assert await ask(broker, orjson.dumps({"after": first})) == after_first
    nothing: dict[str, object] = {"records": [], "remaining": 0}
    assert await ask(broker, orjson.dumps({"after": last})) == nothing
    assert await ask(broker, subject="infer.records.evil.bar.0a") == nothing


async def test_what_is_void_is_not_read(broker: Broker) -> None:
    """An attempt that found the log without its beginning began anew."""
    await TokenLog(broker, ADDRESS, shards=1).append_packed([chunk(n) for n in range(3, 400)])
    log = TokenLog(broker, ADDRESS, shards=1)
    await log.claim("m", "1", "w")
    await log.append_packed([chunk(0)])
    found = [messages.unpack(record) async for _, record in read_stored(broker.client, REPLY, 0)]
    assert [record["type"] for record in found] == ["started", "chunk"]


async def test_a_producer_that_missed_replies_reads_them(broker: Broker) -> None:
    """It listens too late, and then once more after a gap; every record comes once."""
    log = TokenLog(broker, ADDRESS, shards=1)
    await log.append_packed([chunk(0), chunk(1)])
    replies = await broker.client.subscribe(REPLY)
    await broker.client.flush()
    await log.append_packed([chunk(2)])
    records = read_replies(broker.client, replies)
    assert [(await anext(records))["index"] for _ in range(3)] == [0, 1, 2]
    await log.append_packed([chunk(3), chunk(4)])
    await replies.next_msg(60)
    await log.append(DONE)
    found = [(await anext(records)) for _ in range(3)]
    assert [record.get("index") for record in found] == [3, 4, None]


async def test_a_log_that_was_put_back_is_read_by_its_chunks(broker: Broker) -> None:
    """The brokers have lost their memory; sequences are others, and some replies were missed."""
    log = TokenLog(broker, ADDRESS, shards=1)
    replies = await broker.client.subscribe(REPLY)
    await broker.client.flush()
    await log.append_packed([chunk(0), chunk(1)])
    records = read_replies(broker.client, replies)
    assert [(await anext(records))["index"] for _ in range(2)] == [0, 1]
    stored = await broker.read_subject("TOKENS_0", subjects.log(ADDRESS, 1))
    await broker.js.purge_stream("TOKENS_0")
    again = TokenLog(broker, ADDRESS, shards=1)
    await again.append_packed([message.data for message in stored])
    await replies.next_msg(60)
    await again.append_packed([chunk(2)])
    await again.append(DONE)
    found = [await anext(records) for _ in range(2)]
    assert [record.get("index") for record in found] == [2, None]


@pytest.mark.parametrize(
    "question",
    [
        *(
            b"{",
            b"[]",
            b'{"after": -1}',
            b'{"after": "1"}',
            b'{"after": true}',
            b"\xff",
            b"[" * 200,
        ),
        *(b'{"after": 18446744073709551615}', b'{"after": 1e9}', b"{}" + b" " * 1_000_000),
    ],
    ids=range(10),
)
async def test_a_malformed_question_is_refused(broker: Broker, question: bytes) -> None:
    """And the next one is answered."""
    refused = (await ask(broker, question))["error"]
    assert isinstance(refused, dict)
    assert refused["code"] == "invalid_request"
    assert "records" in await ask(broker)


async def test_a_subject_that_names_no_log_is_refused(broker: Broker) -> None:
    """A wildcard there would read the logs of others."""
    refused = (await ask(broker, subject="infer.records.acme.BAR.0a"))["error"]
    assert isinstance(refused, dict)
    assert "BAR" in str(refused["message"])


@pytest.mark.parametrize("record", [b"\xc1", b"", b"\x01", b"\x90", b"\x80"])
async def test_a_record_that_cannot_be_read_is_answered(broker: Broker, record: bytes) -> None:
    """Its reader would wait for nothing, and ask again for ever."""
    await TokenLog(broker, ADDRESS, shards=1).append_packed([record])
    with capture_logs():
        answer = await ask(broker)
    assert isinstance(answer["error"], dict)
    assert answer["error"]["code"] == "internal_error"
    assert "records" in await ask(broker, subject="infer.records.acme.bar.0b")


async def test_a_question_is_answered_on_inboxes_alone(tmp_path: Path) -> None:
    """On any other subject the answer would be taken for something else.

    Between accounts a server gives each question an inbox of its own; here is none.
    """
    heard: list[str] = []

    async def note(msg: Msg) -> None:
        heard.append(msg.subject)

    server = NatsServer(tmp_path)
    try:
        async with connect(server.url, "test") as broker:
            await declaration.declare(broker, topology.Scale(), max_queued=10)
            await StoredRecords(broker, shards=1).open()
            for subject in ("infer.pressure.m", "_INBOX.mine"):
                await broker.subscribe(subject, note)
                await broker.publish(QUESTION, b"", reply=subject)
            await eventually(lambda: heard == ["_INBOX.mine"])
            assert "records" in await ask(broker)
            assert heard == ["_INBOX.mine"]
    finally:
        server.kill()

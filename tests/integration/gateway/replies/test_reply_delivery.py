"""Lost, late and unread replies: every token once and in order, at a bounded cost."""

import asyncio
import gc
import json
import random
import socket as sockets
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from gateway import service
from gateway.entrypoints.websocket_reply import WebSocketReply
from gateway.replies import relay, subscription_deadlines
from gateway.replies.catchup import Catchup
from gateway.replies.log_cursor import LogCursor
from gateway.replies.log_subscription import DeliveryState, LogSubscription, StoredRecord
from gateway.replies.relay import Relay
from gateway.replies.send_buffer import LIMIT_BYTES
from gateway.server import http_protocol, uvicorn_server, write_timeout
from gateway.settings import GatewaySettings
from streams import messages, subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.broker.responses import MessagePage
from streams.messages import Record
from streams.records.token_log import TokenLog
from streams.subjects import LogAddress, PoolKey, Priority
from tests.integration.gateway.conftest import Transport
from tests.support.accounts_server import connect as connect_nats
from tests.support.eventually import eventually
from tests.support.gateways import (
    GatewaySocket,
    RunningGateway,
    cell,
    limit_tls_buffer,
    text_of,
    token_indices,
)
from tests.support.nats_server import NatsServer

QUICK = {"ttft_ms": 1, "itl_ms": 1}
FAST = {"ttft_ms": 1, "itl_ms": 0}
ENDS = ("done", "error")
OnReply = Callable[[Relay, bytes, bytes, bytes], None]


def unreliable(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Let a share of all replies get lost, and others come twice."""
    deliver: OnReply = Relay._on_reply
    chance = random.Random(7)

    def on_reply(self: Relay, subject: bytes, data: bytes, headers: bytes) -> None:
        if chance.random() >= share:
            deliver(self, subject, data, headers)
            if chance.random() < share:
                deliver(self, subject, data, headers)

    monkeypatch.setattr(Relay, "_on_reply", on_reply)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
async def test_lost_replies_are_read_from_the_log(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """NATS may drop what the gateway is too slow for; with all replies lost the log is enough."""
    unreliable(monkeypatch, share)
    monkeypatch.setattr("gateway.replies.subscription_deadlines.FIRST_CHECK_SECONDS", 0.2)
    async with cell(nats_url, mock=QUICK) as (gateway,), gateway.socket() as socket:
        for i in range(5):
            await socket.generate(str(i), max_tokens=200)
        frames: list[dict[str, Any]] = []
        while sum(frame["type"] == "done" for frame in frames) < 5:
            frames.append(await socket.receive())
        for i in range(5):
            mine = [frame for frame in frames if frame["id"] == str(i)]
            assert token_indices(mine) == list(range(200))
        answer = await gateway.complete(max_tokens=200, stream=True)
        assert answer.text == text_of(mine)


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of the gateway whose kernel buffers little, so that not reading is soon felt."""

    def listen_small(settings: GatewaySettings) -> sockets.socket:
        listener = uvicorn_server.listen(settings)
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, 8192)
        return listener

    monkeypatch.setattr(service, "listen", listen_small)


async def test_a_fault_of_ours_ends_one_request_alone(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error; the socket, its other requests and the gateway go on."""
    relayed = WebSocketReply._send_chunk

    def faulty(self: WebSocketReply, record: Record) -> bool:
        if self.id == "bad" and record["index"] > 5:
            raise ZeroDivisionError
        return relayed(self, record)

    monkeypatch.setattr(WebSocketReply, "_send_chunk", faulty)
    async with cell(nats_url, mock=QUICK) as (gateway,), gateway.socket() as socket:
        await socket.generate("bad", max_tokens=50)
        await socket.generate("good", max_tokens=50)
        frames = [await socket.receive()]
        while sum(frame["type"] in ("done", "error") for frame in frames) < 2:
            frames.append(await socket.receive())
        ends = {frame["id"]: frame.get("code") for frame in frames if frame["type"] in ENDS}
        assert ends == {"bad": "internal_error", "good": None}
        assert token_indices([frame for frame in frames if frame["id"] == "good"]) == list(
            range(50)
        )
        await eventually(lambda: nothing_followed(gateway))


async def test_what_has_ended_leaves_nothing_behind(nats_url: str) -> None:
    """Not even until the collector comes: at 20 requests a second 2 MiB gathered in a minute."""
    async with cell(nats_url, mock=QUICK) as (gateway,), gateway.socket() as socket:
        await socket.generate("first", max_tokens=5)
        await socket.receive_until("first", "done")
        gc.collect()
        gc.disable()
        try:
            await socket.generate("second", max_tokens=5)
            await socket.receive_until("second", "done")
            await gateway.complete(max_tokens=5, stream=True)
            await eventually(
                lambda: (
                    not any(type(o) in (WebSocketReply, LogSubscription) for o in gc.get_objects())
                )
            )
        finally:
            gc.enable()


async def connection(gateway: RunningGateway) -> sockets.socket:
    """A client's end with small buffers."""
    tcp = sockets.socket()
    tcp.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    tcp.setblocking(False)
    await asyncio.get_running_loop().sock_connect(tcp, ("127.0.0.1", gateway.port))
    return tcp


async def flood(socket: GatewaySocket, requests: int) -> None:
    """Ask for more than all buffers on the way hold."""
    limit_tls_buffer(socket.connection.transport, 4096)
    for i in range(requests):
        await socket.generate(str(i), max_tokens=3000, logprobs=2)


@pytest.mark.usefixtures("small_buffers")
async def test_who_does_not_read_is_cut_and_harms_nobody(
    nats_url: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is bounded by bytes, and after a while without progress it has to go."""
    monkeypatch.setattr(write_timeout, "WRITE_TIMEOUT_SECONDS", 2.0)
    async with cell(nats_url, mock=FAST, grace_seconds=0, **transport) as (gateway,):
        tcp = await connection(gateway)
        async with gateway.socket(sock=tcp, max_queue=1, ping_interval=None) as socket:
            await flood(socket, 4)
            await eventually(gateway.followed_requests)
            assert (await gateway.complete()).status == 200
            await eventually(lambda: no_sockets(gateway))
            await eventually(lambda: nothing_followed(gateway))
            assert (await gateway.complete()).status == 200


async def no_sockets(gateway: RunningGateway) -> bool:
    return await gateway.metric("millstream_open_websockets") == 0


async def nothing_followed(gateway: RunningGateway) -> bool:
    return await gateway.followed_requests() == 0


@pytest.mark.usefixtures("small_buffers")
async def test_an_http_client_that_does_not_read_is_cut_too(
    nats_url: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But only after minutes, since it may just pause. Nobody can get the answer any more."""
    monkeypatch.setattr(http_protocol, "PAUSE_SECONDS", 2.0)
    async with cell(nats_url, mock=FAST, **transport) as (gateway,):
        tcp = await connection(gateway)
        wanted = {"model": "mock", "prompt": "x", "max_tokens": 8000, "logprobs": 2, "stream": True}
        body = json.dumps(wanted).encode()
        head = f"Authorization: Bearer sk-acme\r\nContent-Length: {len(body)}\r\n\r\n"
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head.encode() + body
        _, writer = await gateway.connect(tcp, limit=2048)
        writer.write(request)
        await eventually(gateway.followed_requests)
        await eventually(lambda: nothing_followed(gateway))
        writer.transport.abort()


@pytest.mark.usefixtures("small_buffers")
async def test_an_http_client_may_pause(
    nats_url: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a WebSocket may, since a request without a key cannot be resumed."""
    monkeypatch.setattr(write_timeout, "WRITE_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "TCP_TIMEOUT_SECONDS", 1)
    paused = asyncio.Event()
    pause = http_protocol.HttpProtocol.pause_writing

    def watched(self: http_protocol.HttpProtocol) -> None:
        pause(self)
        paused.set()

    monkeypatch.setattr(http_protocol.HttpProtocol, "pause_writing", watched)
    async with cell(nats_url, mock=FAST, **transport) as (gateway,):
        tcp = await connection(gateway)
        reader, writer = await gateway.connect(tcp, limit=2048)
        wanted = {"model": "mock", "prompt": "x", "max_tokens": 8000, "logprobs": 2, "stream": True}
        body = json.dumps(wanted).encode()
        head = f"Authorization: Bearer sk-acme\r\nContent-Length: {len(body)}\r\n"
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(request + head.encode() + b"\r\n" + body)
        await paused.wait()
        before = asyncio.get_running_loop().time()
        await eventually(lambda: asyncio.get_running_loop().time() > before + 3.0)
        async with asyncio.timeout(60):
            assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()


@pytest.mark.usefixtures("small_buffers")
async def test_a_slow_reader_gets_everything_once(
    nats_url: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paused and later fed from the log, while others stream at full speed."""
    paused: list[bool] = []
    take = LogSubscription.consume_record

    def watched(self: LogSubscription, seq: int, data: bytes) -> bool:
        wanted = take(self, seq, data)
        paused.append(self.state is DeliveryState.PAUSED)
        return wanted

    monkeypatch.setattr(LogSubscription, "consume_record", watched)
    async with cell(nats_url, mock=FAST, **transport) as (gateway,):
        tcp = await connection(gateway)
        async with gateway.socket(sock=tcp, max_queue=1, ping_interval=None) as socket:
            await flood(socket, 3)
            await eventually(lambda: any(paused))
            assert (await gateway.complete(max_tokens=300)).status == 200
            frames: list[dict[str, Any]] = []
            while sum(frame["type"] == "done" for frame in frames) < 3:
                frames.append(await socket.receive())
        tcp.close()
        for i in range(3):
            mine = [frame for frame in frames if frame["id"] == str(i)]
            assert token_indices(mine) == list(range(3000))


async def test_a_log_that_is_slow_to_read_holds_nobody_up(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a gateway's death all its clients come at once, and each log is read anew."""
    begun, slow, read = asyncio.Event(), asyncio.Event(), Catchup.fetch_page

    async def page(self: Catchup, following: LogSubscription) -> tuple[list[StoredRecord], int]:
        if following.request_id == ids[0]:
            begun.set()
            await slow.wait()
        return await read(self, following)

    async with cell(nats_url, mock=QUICK) as (gateway,), gateway.socket() as socket:
        ids: list[str] = []
        for name in ("a", "b"):
            await socket.generate(name, max_tokens=20)
            ids.append((await socket.receive_until(name, "done"))[0]["request_id"])
        monkeypatch.setattr(Catchup, "fetch_page", page)
        await socket.send(type="resume", id="a", request_id=ids[0], after=-1)
        await begun.wait()
        await socket.send(type="resume", id="b", request_id=ids[1], after=-1)
        assert token_indices(await socket.receive_until("b", "done")) == list(range(20))
        slow.set()
        assert token_indices(await socket.receive_until("a", "done")) == list(range(20))


class Reader:
    """A sink that takes what it is told to."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.room = True

    def __call__(self, record: Record, size: int) -> bool:
        self.records.append(record)
        return self.room


async def followed(
    broker: Broker, relayed: Relay, reader: Reader
) -> tuple[LogSubscription, TokenLog]:
    await declaration.declare(broker, topology.Scale(), max_queued=10)
    following = relayed.subscribe_new("acme", "0a", reader)
    following.is_durable = True
    log = TokenLog(broker, LogAddress("acme", relayed.route, "0a"), shards=1)
    await log.append(messages.started_record("m", "1", 1, "w"))
    await log.append(CHUNK)
    await eventually(lambda: len(reader.records))
    return following, log


CHUNK = {"type": "chunk", "index": 0, "count": 1, "text": "a", "tokens": [1]}


async def test_no_more_of_a_log_is_read_at_once_than_may_wait_for_a_reader(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records differ in size by a thousand; one alone may be larger than that."""
    pages, read = list[list[int]](), Broker.read_page

    async def read_page(self: Broker, stream: str, query: Mapping[str, int | str]) -> MessagePage:
        page = await read(self, stream, query)
        if "next_by_subj" in query:
            pages.append([len(message.data) for message in page.messages])
        return page

    monkeypatch.setattr(Broker, "read_page", read_page)
    texts = [size * "x" for size in (9_000, 200_000, 300_000, *[9_000] * 50, 300_000)]
    async with connect_nats(nats_url, "test") as broker, asyncio.TaskGroup() as tasks:
        relayed, reader = Relay(broker, "gw-a", 1, 10), Reader()
        await relayed.open()
        housekeeping = tasks.create_task(relayed.run())
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        log = TokenLog(broker, LogAddress("acme", "gw-b", "0a"), shards=1)
        for index, text in enumerate(texts):
            await log.append({**CHUNK, "index": index, "text": text})
        await log.append(messages.done_record("stop", messages.openai_usage(1, 1), {}))
        relayed.unpause(await relayed.resume("acme", "0a", reader))
        await eventually(lambda: len(relayed) == 0)
        housekeeping.cancel()
    assert [record["text"] for record in reader.records[:-1]] == texts
    assert len(pages) > 5
    assert all(sum(page[1:-1]) < LIMIT_BYTES for page in pages)


@pytest.mark.parametrize("after", [-1, 400])
async def test_what_is_void_in_a_log_is_read_by_nobody(nats_url: str, after: int) -> None:
    """A log lost its beginning, and an attempt began anew: pages of older records are behind it."""
    async with connect_nats(nats_url, "test") as broker, asyncio.TaskGroup() as tasks:
        relayed, reader = Relay(broker, "gw-a", 1, 10), Reader()
        await relayed.open()
        housekeeping = tasks.create_task(relayed.run())
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        address = LogAddress("acme", "gw-b", "0a")
        void = [numbered_chunk(index) for index in range(3, 603)]
        await TokenLog(broker, address, shards=1).append_packed(void)
        log = TokenLog(broker, address, shards=1)
        assert (await log.claim("m", "1", "w2")).is_truncated
        await log.append_packed([numbered_chunk(index) for index in range(603)])
        await log.append(messages.done_record("stop", messages.openai_usage(1, 603), {}))
        relayed.unpause(await relayed.resume("acme", "0a", reader, LogCursor(after, after + 1)))
        await eventually(lambda: len(relayed) == 0)
        housekeeping.cancel()
    started, *chunks, done = reader.records
    assert (started["type"], started["worker"], done["type"]) == ("started", "w2", "done")
    assert [record["index"] for record in chunks] == list(range(after + 1, 603))


def numbered_chunk(index: int) -> bytes:
    place = {"index": index, "characters": index, "tokens": [index]}
    return messages.pack(CHUNK | place)


async def test_a_log_that_nobody_puts_back_ends_in_an_error(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request had ended, its slow reader had not: it must not look like the whole."""
    monkeypatch.setattr(relay, "LOST_SECONDS", 0.1)
    async with connect_nats(nats_server.url, "test") as broker, asyncio.TaskGroup() as tasks:
        relayed, reader = Relay(broker, "gw-a", 1, 10), Reader()
        await relayed.open()
        housekeeping = tasks.create_task(relayed.run())
        reader.room = False
        following, log = await followed(broker, relayed, reader)
        await log.append(messages.done_record("stop", messages.openai_usage(1, 1), {}))
        nats_server.kill()
        await eventually(lambda: not broker.is_connected)
        nats_server.restart()
        await eventually(lambda: broker.is_connected)
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        relayed.unpause(following)
        await eventually(lambda: reader.records[-1]["type"] == "error")
        assert reader.records[-1]["code"] == "log_lost"
        assert len(relayed) == 0
        housekeeping.cancel()


async def test_a_log_that_is_put_back_and_left_ends_in_an_error(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker lost the work, too, and the worker has put back what it had and let it go."""
    monkeypatch.setattr(subscription_deadlines, "FIRST_CHECK_SECONDS", 0.1)
    async with connect_nats(nats_server.url, "test") as broker, asyncio.TaskGroup() as tasks:
        relayed, reader = Relay(broker, "gw-a", 1, 10), Reader()
        await relayed.open()
        housekeeping = tasks.create_task(relayed.run())
        _, log = await followed(broker, relayed, reader)
        nats_server.kill()
        await eventually(lambda: not broker.is_connected)
        nats_server.restart()
        await eventually(lambda: broker.is_connected)
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        await log.append(messages.unpack(numbered_chunk(1)))
        await eventually(lambda: reader.records[-1].get("index") == 1)
        monkeypatch.setattr(relay, "LOST_SECONDS", 0.1)
        await eventually(lambda: reader.records[-1]["type"] == "error")
        assert reader.records[-1]["code"] == "log_lost"
        assert len(relayed) == 0
        housekeeping.cancel()


async def test_a_lost_log_is_not_given_up_while_a_leader_cannot_be_asked(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers that come back elect leaders for long; until then nobody knows what is in flight."""
    monkeypatch.setattr(relay, "LOST_SECONDS", 0.1)
    monkeypatch.setattr("gateway.replies.subscription_deadlines.FIRST_SEARCH_SECONDS", 0.1)
    monkeypatch.setattr("gateway.replies.subscription_deadlines.SEARCH_SECONDS", 0.1)
    questions: list[str] = []

    async def on_find(msg: Msg) -> None:
        questions.append(msg.subject)

    async with connect_nats(nats_url, "test") as broker, asyncio.TaskGroup() as tasks:
        relayed, reader = Relay(broker, "gw-a", 1, 10), Reader()
        await relayed.open()
        housekeeping = tasks.create_task(relayed.run())
        await followed(broker, relayed, reader)
        await broker.store(subjects.work(PoolKey("mock", "1", Priority.STANDARD)), b"")
        await broker.subscribe(subjects.ALL_FINDS, on_find)
        await broker.js.purge_stream(topology.token_stream_name(0))
        for reconnected in broker.on_reconnect:
            reconnected()
        await eventually(lambda: len(questions) > 3)
        assert reader.records[-1]["type"] == "chunk"
        await broker.js.purge_stream(topology.WORK)
        await eventually(lambda: reader.records[-1].get("code") == "log_lost")
        housekeeping.cancel()


async def test_a_request_without_a_sign_ends_at_its_deadline(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was lost on the way, nobody waits for ever."""
    async with connect_nats(nats_url, "test") as broker, asyncio.TaskGroup() as tasks:
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        relayed, reader = Relay(broker, "gw-a", 1, 10), Reader()
        await relayed.open()
        housekeeping = tasks.create_task(relayed.run())
        relayed.subscribe_new("acme", "0a", reader).deadlines.expires_at = 0.0
        await eventually(lambda: reader.records)
        assert reader.records[-1]["code"] == "deadline_exceeded"
        assert len(relayed) == 0
        housekeeping.cancel()


async def test_a_cancel_is_repeated_until_the_end_has_come(nats_url: str) -> None:
    """It is heard at most once: the first may come too early, or get lost."""
    async with connect_nats(nats_url, "test") as broker, asyncio.TaskGroup() as tasks:
        relayed, reader = Relay(broker, "gw-a", 1, 10), Reader()
        cancels: list[str] = []

        async def on_cancel(msg: Msg) -> None:
            cancels.append(msg.subject)

        await broker.subscribe(subjects.heard(subjects.ALL_CANCELS), on_cancel)
        await relayed.open()
        housekeeping = tasks.create_task(relayed.run())
        following, log = await followed(broker, relayed, reader)
        relayed.cancel(following)
        await eventually(lambda: len(cancels) >= 3)
        await log.append(messages.done_record("cancelled", messages.openai_usage(1, 1), {}))
        await eventually(lambda: len(relayed) == 0)
        housekeeping.cancel()


async def test_a_cancel_that_the_broker_refuses_is_heard_once_it_takes_it(nats_url: str) -> None:
    """An operator has deleted the stream of signals, which is made anew."""
    async with connect_nats(nats_url, "test") as broker, asyncio.TaskGroup() as tasks:
        relayed, reader = Relay(broker, "gw-a", 1, 10), Reader()
        cancels: list[str] = []

        async def on_cancel(msg: Msg) -> None:
            cancels.append(msg.subject)

        await broker.subscribe(subjects.heard(subjects.ALL_CANCELS), on_cancel)
        await relayed.open()
        housekeeping = tasks.create_task(relayed.run())
        following, _ = await followed(broker, relayed, reader)
        await broker.js.delete_stream(topology.SIGNALS)
        with capture_logs() as logged:
            relayed.cancel(following)
            await eventually(lambda: [e for e in logged if e["event"] == "cancels_not_sent"])
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        await eventually(lambda: cancels)
        housekeeping.cancel()

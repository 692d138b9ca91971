"""Abuse at the door: slow, idle, endless, empty things are bounded, and honest clients served."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode

from gateway.server import http_protocol, uvicorn_server, websocket_protocol
from gateway.server.http_protocol import TCP_TIMEOUT_SECONDS
from gateway.settings import GatewaySettings
from streams.base_settings import KeySettings, TenantSettings
from tests.integration.gateway.conftest import Transport
from tests.support.eventually import eventually
from tests.support.gateways import KEY, OTHER_KEY, RunningGateway, cell, gateways
from tests.support.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

FEW_KEY, PACED_KEY = "sk-few", "sk-paced"
HANDSHAKE = (
    "GET /v1/stream HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    f"Authorization: Bearer {KEY}\r\n"
)


def whole(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    """A frame as a client sends it."""
    return Frame(opcode, data, fin).serialize(mask=True)


class Raw:
    """A connection on which anything may be sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes | str) -> None:
        self.writer.write(data.encode() if isinstance(data, str) else data)

    async def rest(self) -> bytes:
        """All that comes until the gateway ends the connection."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def refusal(self) -> tuple[int, str]:
        """The status and code of the answer with which the connection ends."""
        head, _, body = (await self.rest()).partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)["error"]["code"]

    async def upgrade(self) -> None:
        self.send(HANDSHAKE + "\r\n")
        assert b" 101 " in await self.reader.readuntil(b"\r\n\r\n")

    async def frame(self) -> tuple[int, bytes]:
        """The next short frame: its opcode and what it holds."""
        async with asyncio.timeout(20):
            opcode, size = await self.reader.readexactly(2)
            return opcode & 15, await self.reader.readexactly(size)

    async def closing(self) -> tuple[int, str]:
        """The code and reason of the close frame, which is the last one."""
        *_, found = _frames(await self.rest())
        assert found[0] == Opcode.CLOSE
        return int.from_bytes(found[1][:2], "big"), found[1][2:].decode()


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Short frames of a server."""
    while data:
        size = data[1]
        yield data[0] & 15, data[2 : 2 + size]
        data = data[2 + size :]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(shared_nats_url: str, transport: Transport) -> AsyncIterator[RunningGateway]:
    """One for all these tests: whatever they send must leave it unharmed."""
    few = KeySettings.model_validate({"key": FEW_KEY, "name": "few", "max_connections": 2})
    paced = KeySettings.model_validate({"key": PACED_KEY, "frames_per_second": 200})
    keys = (KeySettings.model_validate(KEY), few, paced)
    tenants = {"acme": TenantSettings(keys=keys), "other": TenantSettings(keys=(OTHER_KEY,))}
    async with cell(shared_nats_url, tenants=tenants, **transport) as (gateway,):
        yield gateway


@asynccontextmanager
async def connected(gateway: RunningGateway) -> AsyncIterator[Raw]:
    connection = Raw(*await gateway.connect())
    yield connection
    connection.writer.transport.abort()


@pytest_asyncio.fixture(loop_scope="module")
async def raw(gateway: RunningGateway) -> AsyncIterator[Raw]:
    async with connected(gateway) as found:
        yield found


async def serves(gateway: RunningGateway) -> None:
    assert (await gateway.complete()).status == 200


HEADS = {
    "a long line": "GET / HTTP/1.1\r\nHost: x\r\nCookie: " + "x" * 9000 + "\r\n\r\n",
    "a long path": "GET /" + "x" * 9000 + " HTTP/1.1\r\nHost: x\r\n\r\n",
    "many headers": "GET / HTTP/1.1\r\n" + "A: b\r\n" * 200 + "\r\n",
    "long headers": "GET / HTTP/1.1\r\n" + ("A: " + "b" * 4000 + "\r\n") * 20 + "\r\n",
    "a line without end": "GET / HTTP/1.1\r\nHost: x\r\nCookie: " + "x" * 2_000_000,
    "a path without end": "GET /" + "x" * 2_000_000,
    "a handshake with many headers": HANDSHAKE + "A: b\r\n" * 200 + "\r\n",
    "a handshake with a long line": HANDSHAKE + "A: " + "b" * 9000 + "\r\n\r\n",
}


@pytest.mark.parametrize("what", HEADS)
async def test_a_head_over_its_limits_is_a_431(
    gateway: RunningGateway, raw: Raw, what: str
) -> None:
    """The answer comes although the client has not ended, and may still be writing."""
    raw.send(HEADS[what])
    assert await raw.refusal() == (431, "headers_too_large")
    await serves(gateway)


@pytest.mark.parametrize(
    "garbage", ["\r\n\r\nhello\r\n\r\n", "\x16\x03\x01\x02\x00\x01", "GET\r\n"]
)
async def test_what_is_not_http_is_a_400(gateway: RunningGateway, raw: Raw, garbage: str) -> None:
    """In the shape of every other error: who speaks TLS to this port must learn why it fails."""
    raw.send(garbage)
    assert await raw.refusal() == (400, "invalid_request")
    await serves(gateway)


async def test_garbage_behind_a_request_harms_the_connection_alone(raw: Raw) -> None:
    """The answer under way comes whole; the error is behind it, and not written into it."""
    body = json.dumps({"model": "mock", "prompt": "x", "max_tokens": 4000, "stream": True})
    head = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    raw.send(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n{body}")
    await raw.reader.readuntil(b"\r\n\r\n")
    raw.send("garbage\r\n\r\n")
    answer, _, refusal = (await raw.rest()).partition(b"\r\n0\r\n\r\n")
    assert answer.endswith(b"data: [DONE]\n\n")
    assert refusal.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("begun", ["GET / HTTP/1.1\r\nHost: x\r\n", "G", HANDSHAKE])
async def test_a_head_that_does_not_end_is_a_408(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    """Slowloris: every byte comes in time and the head never does, on HTTP and in a handshake."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_SECONDS", 1.0)
    async with connected(gateway) as raw:
        raw.send(begun)
        assert await raw.refusal() == (408, "request_timeout")


async def test_a_connection_that_says_nothing_is_closed(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first, and after an answer, also while the body of an answered request trickles in."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_SECONDS", 1.0)
    async with connected(gateway) as silent, connected(gateway) as trickling:
        trickling.send("GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx")
        assert await silent.rest() == b""
        assert b"200 OK" in await trickling.rest()


async def test_a_head_that_begins_during_a_response_has_no_more_time(
    gateway: RunningGateway, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time between requests is longer, and is not for a head that has begun."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_SECONDS", 1.0)
    raw.send("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost:")
    answers = (await raw.rest()).split(b"HTTP/1.1 ")[1:]
    assert [int(answer[:3]) for answer in answers] == [200, 408]


async def test_who_waits_longest_gives_way_to_a_new_connection(
    nats_url: str, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of connections that ask for nothing keeps nobody out."""
    monkeypatch.setattr(uvicorn_server, "MAX_IDLE_CONNECTIONS", 5)
    async with gateways(nats_url, **transport) as (gateway,), AsyncExitStack() as stack:
        flood = [await stack.enter_async_context(connected(gateway)) for _ in range(9)]
        for each in flood:
            each.send("G")
        assert (await gateway.request("GET", "/healthz")).status == 200
        for each in flood[:4]:
            assert await each.refusal() == (503, "overloaded")


async def test_over_the_gateways_limit_a_connection_is_a_503(
    nats_url: str, transport: Transport
) -> None:
    """Those that are open go on; one that asks for nothing would have given way."""
    async with gateways(nats_url, max_connections=2, **transport) as (gateway,):
        async with gateway.socket() as first, gateway.socket() as second:
            async with connected(gateway) as refused:
                assert await refused.refusal() == (503, "overloaded")
            for each in (first, second):
                await each.send(type="cancel", id="nobody")
                assert (await each.receive())["code"] == "request_not_found"
        assert (await gateway.request("GET", "/healthz")).status == 200


async def test_a_key_has_no_more_connections_than_it_may(gateway: RunningGateway) -> None:
    """Over the limit the handshake is a 429, and so is an HTTP request; other keys come in."""
    async with gateway.socket(key=FEW_KEY), gateway.socket(key=FEW_KEY) as last:
        with pytest.raises(InvalidStatus) as refused:
            await gateway.socket(key=FEW_KEY).__aenter__()
        response = refused.value.response
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
        assert json.loads(response.body)["error"]["code"] == "too_many_connections"
        answer = await gateway.complete(key=FEW_KEY)
        assert (answer.status, answer.error["code"]) == (429, "too_many_connections")
        assert answer.error["param"] == "max_connections"
        await serves(gateway)
        await last.generate("a", max_tokens=2)
        assert (await last.receive_rest("a"))[-1]["type"] == "done"

    async def comes_in() -> bool:
        return (await gateway.complete(key=FEW_KEY)).status == 200

    await eventually(comes_in)


async def test_too_many_frames_wait_and_none_is_lost(gateway: RunningGateway) -> None:
    """A client that sends faster than it may is read more slowly: others do not notice."""
    async with gateway.socket(key=PACED_KEY) as hasty, gateway.socket() as other:
        for _ in range(260):
            await hasty.connection.send("{")
        await other.generate("a", max_tokens=2)
        assert (await other.receive_rest("a"))[-1]["type"] == "done"
        for _ in range(260):
            assert (await hasty.receive())["code"] == "invalid_request"


EMPTY = {
    "pings": whole(Opcode.PING, b""),
    "pongs": whole(Opcode.PONG, b"x" * 125),
    "fragments": whole(Opcode.CONT, b"", fin=False),
}


@pytest.mark.parametrize("what", EMPTY)
async def test_frames_that_carry_nothing_are_bounded(
    gateway: RunningGateway, raw: Raw, what: str
) -> None:
    """They cost work and no quota; `fragments` of nothing grow a message for ever."""
    await raw.upgrade()
    raw.send(whole(Opcode.TEXT, b"{", fin=False) if what == "fragments" else b"")
    raw.send(EMPTY[what] * (websocket_protocol.EMPTY_FRAMES_BURST + 50))
    code, reason = await raw.closing()
    assert (code, "carry nothing" in reason) == (1008, True)
    await serves(gateway)


PARTS = {
    "a frame": whole(Opcode.TEXT, b"{" * 1000)[:500],
    "a head of a frame": b"\x81",
    "a fragmented message": whole(Opcode.TEXT, b"{", fin=False),
}


@pytest.mark.parametrize("what", PARTS)
async def test_a_message_that_does_not_end_is_given_up(
    raw: Raw, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What has come of it is kept in memory; a socket between messages may be silent for ever."""
    monkeypatch.setattr(websocket_protocol, "MESSAGE_TIMEOUT_SECONDS", 1.0)
    await raw.upgrade()
    raw.send(whole(Opcode.TEXT, b"{}") + PARTS[what])
    code, reason = await raw.closing()
    assert (code, "did not come" in reason) == (1008, True)


async def test_messages_may_come_in_any_pieces(gateway: RunningGateway, raw: Raw) -> None:
    """Byte by byte, in fragments with a ping between, and hundreds in one segment."""
    await raw.upgrade()
    cancel = json.dumps({"type": "cancel", "id": "nobody"}).encode()
    for byte in whole(Opcode.TEXT, cancel):
        raw.send(bytes([byte]))
    raw.send(whole(Opcode.TEXT, cancel[:9], fin=False) + whole(Opcode.PING, b"p"))
    raw.send(whole(Opcode.CONT, cancel[9:]) + whole(Opcode.TEXT, cancel) * 500)
    frames = [await raw.frame() for _ in range(503)]
    assert frames.count((Opcode.PONG, b"p")) == 1
    answers = [json.loads(data)["code"] for opcode, data in frames if opcode == Opcode.TEXT]
    assert answers == ["request_not_found"] * 502
    raw.send(whole(Opcode.CLOSE, b"\x03\xe8"))
    assert await raw.closing() == (1000, "")


async def test_a_close_between_fragments_is_a_close(raw: Raw) -> None:
    """RFC 6455 §5.4: control frames may come there."""
    await raw.upgrade()
    raw.send(whole(Opcode.TEXT, b"{", fin=False) + whole(Opcode.CLOSE, b"\x03\xe8"))
    assert await raw.closing() == (1000, "")


async def test_connections_inherit_what_the_kernel_bounds() -> None:
    """An end to clients whose machine is gone, which send no FIN; and little kept for any."""
    with uvicorn_server.listen(GatewaySettings(port=free_port())) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            bounds = {
                socket.TCP_USER_TIMEOUT: TCP_TIMEOUT_SECONDS * 1000,
                socket.TCP_NOTSENT_LOWAT: uvicorn_server.UNSENT_BYTES,
            }
            for option, value in bounds.items():
                assert accepted.getsockopt(socket.IPPROTO_TCP, option) == value


async def test_a_giant_frame_ends_its_socket_with_1009(raw: Raw) -> None:
    """By its announced length, before any of it has come."""
    await raw.upgrade()
    raw.send(b"\x81\xff" + (2**40).to_bytes(8, "big") + b"mask")
    code, _ = await raw.closing()
    assert code == 1009


async def test_who_sends_pings_and_reads_nothing_is_not_read_either(
    gateway: RunningGateway, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pong would wait in memory: the client's own writes must come to a stop."""
    monkeypatch.setattr(websocket_protocol, "EMPTY_FRAMES_BURST", 1e9)
    await raw.upgrade()
    raw.reader._limit = 1024  # type: ignore[attr-defined]  # so that this client stops reading
    pings = whole(Opcode.PING, b"x" * 125) * 10_000
    for _ in range(20):
        raw.send(pings)
    await serves(gateway)
    assert raw.writer.transport.get_write_buffer_size() > 0

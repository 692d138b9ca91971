"""HTTP as clients really speak it: every request gets an answer, and its connection a clear end."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.integration.gateway.conftest import Transport
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, cell

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGIN = "https://app.example"
BODY = json.dumps({"model": "mock", "prompt": "hi", "max_tokens": 3}).encode()
STREAM = json.dumps({"model": "mock", "prompt": "hi", "max_tokens": 3, "stream": True}).encode()
HANDSHAKE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)
H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(shared_nats_url: str, transport: Transport) -> AsyncIterator[RunningGateway]:
    async with cell(shared_nats_url, cors_origins=(ORIGIN,), **transport) as (gateway,):
        yield gateway


def head(
    *headers: str, method: str = "POST", path: str = "/v1/completions", version: str = "1.1"
) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x", f"Authorization: Bearer {KEY}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def post(*headers: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    return head(f"Content-Length: {len(body)}", *headers, version=version) + body


def chunked(*headers: str, body: bytes = BODY, coding: str = "chunked") -> bytes:
    start = head(f"Transfer-Encoding: {coding}", *headers)
    return start + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


GET = head(method="GET", path="/healthz")
LAST = head("Connection: close", method="GET", path="/healthz")


async def talk(gateway: RunningGateway, data: bytes) -> bytes:
    """All that the gateway answers until it ends the connection."""
    reader, writer = await gateway.connect()
    try:
        writer.write(data)
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.transport.abort()


def statuses(answer: bytes) -> list[int]:
    return [int(part.split()[0]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(*H2C),
        chunked(*H2C),
        post("Connection: upgrade", "Upgrade: TLS/1.0"),
        post("Connection: upgrade", "Upgrade: h2c, foo/2"),
        post("Upgrade: websocket"),
    ],
)
async def test_an_upgrade_that_is_not_ours_is_ignored(
    gateway: RunningGateway, request_bytes: bytes
) -> None:
    """RFC 9110, 7.8: the JDK's client and `curl --http2` offer h2c with every request."""
    answer = await talk(gateway, request_bytes + LAST)
    assert statuses(answer) == [200, 200]
    assert b'"choices"' in answer


async def test_such_a_body_may_come_in_pieces(gateway: RunningGateway) -> None:
    reader, writer = await gateway.connect()
    for byte in post(*H2C, "Connection: close"):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert b'"choices"' in await reader.read()
    writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        head("Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n",
        head("Transfer-Encoding: chunked") + b"-1\r\n",
        head("Transfer-Encoding: chunked") + b"ffffffffffffffff1\r\n",
        head("Transfer-Encoding: chunked") + b"2\r\n{}!!0\r\n\r\n",
        head("Transfer-Encoding: gzip") + BODY,
        chunked(coding="gzip, chunked"),
        chunked(coding="chunked, chunked"),
        head("Content-Length: x"),
        head("Content-Length: 2", "Content-Length: 3"),
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        post(*HANDSHAKE),
        head(*HANDSHAKE, "Content-Length: 2", method="GET", path="/v1/stream") + b"{}",
        head(*HANDSHAKE, "Transfer-Encoding: chunked", method="GET", path="/v1/stream"),
        b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n",
    ],
)
async def test_what_is_malformed_gets_a_400_and_then_the_end(
    gateway: RunningGateway, request_bytes: bytes
) -> None:
    answer = await talk(gateway, request_bytes)
    assert statuses(answer) == [400]
    assert b"x-request-id: " in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("before", [GET, post(), post(body=STREAM), GET + post()])
async def test_a_request_before_garbage_gets_its_answer(
    gateway: RunningGateway, before: bytes
) -> None:
    answer = await talk(gateway, before + b"GARBAGE\r\n\r\n")
    assert statuses(answer) == [200] * before.count(b"Host: x") + [400]


async def test_requests_before_a_malformed_one_get_their_answers(gateway: RunningGateway) -> None:
    broken = head("Transfer-Encoding: chunked") + b"zz\r\n"
    assert statuses(await talk(gateway, post() + broken)) == [200, 400]


async def test_a_client_of_http_1_0_gets_neither_chunks_nor_100(gateway: RunningGateway) -> None:
    """RFC 9112, 6.1 and RFC 9110, 10.1.1: the body of a stream ends with the connection."""
    streamed = await talk(gateway, post("Expect: 100-continue", body=STREAM, version="1.0"))
    assert b"transfer-encoding" not in streamed.lower()
    assert streamed.endswith(b"data: [DONE]\n\n")
    whole = await talk(gateway, post("Expect: 100-continue", version="1.0"))
    assert statuses(whole) == statuses(streamed) == [200]


@pytest.mark.parametrize("path", ["/nope", "/v1/models/nope"])
async def test_an_early_answer_to_a_client_that_waits_for_100_ends_the_connection(
    gateway: RunningGateway, path: str
) -> None:
    """Nobody knows whether the body will come: the next bytes may be a request or that body."""
    answer = await talk(gateway, head("Content-Length: 300", "Expect: 100-continue", path=path))
    assert b"connection: close" in answer


async def test_a_body_that_nobody_reads_is_drained(gateway: RunningGateway) -> None:
    unread = head("Content-Length: 200000", path="/nope") + bytes(200_000)
    assert statuses(await talk(gateway, unread + LAST)) == [404, 200]


async def test_who_waits_for_100_gets_it(gateway: RunningGateway) -> None:
    reader, writer = await gateway.connect()
    writer.write(head(f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(BODY)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()


WRONG_HANDSHAKES = {
    "a wrong path": (head(*HANDSHAKE, method="GET", path="/v1/stream/"), 404),
    "another path": (head(*HANDSHAKE, method="GET", path="/v1/models"), 404),
    "no key": (head(*HANDSHAKE[:2], HANDSHAKE[3], method="GET", path="/v1/stream"), 400),
    "another version": (head(*HANDSHAKE[:3], method="GET", path="/v1/stream"), 400),
    "two protocols": (
        head("Upgrade: websocket, h2c", *HANDSHAKE[1:], method="GET", path="/v1/stream"),
        426,
    ),
    "an unknown subprotocol": (
        head(*HANDSHAKE, "Sec-WebSocket-Protocol: x", method="GET", path="/v1/stream"),
        400,
    ),
}


@pytest.mark.parametrize("what", WRONG_HANDSHAKES)
async def test_a_wrong_handshake_is_answered_with_an_error(
    gateway: RunningGateway, what: str
) -> None:
    sent, status = WRONG_HANDSHAKES[what]
    answer = await talk(gateway, sent)
    assert statuses(answer) == [status]
    assert b"x-request-id: " in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_a_connection_may_be_idle_for_longer_than_at_a_proxy(
    nats_url: str, transport: Transport
) -> None:
    """A proxy that reuses a connection while we close it gets a reset, and its client a 502."""
    async with cell(nats_url, **transport) as (gateway,):
        reader, writer = await gateway.connect()
        for _ in range(2):
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b'"ok"}')
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(6):  # longer than uvicorn's 5 s
                    await reader.read(1)
        writer.close()


async def test_the_idle_time_is_a_setting(nats_url: str, transport: Transport) -> None:
    async with cell(nats_url, idle_seconds=1, **transport) as (gateway,):
        assert statuses(await talk(gateway, GET)) == [200]  # and then the end


async def test_who_shuts_its_sending_side_has_left(gateway: RunningGateway) -> None:
    """A half-closed connection looks like a dead client, whose request must not run on."""
    reader, writer = await gateway.connect()
    writer.write(
        post(body=json.dumps({"model": "mock", "prompt": "x", "max_tokens": 5000}).encode())
    )
    await eventually(gateway.followed_requests)
    if writer.can_write_eof():
        writer.write_eof()
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    else:
        writer.close()  # which sends TLS's own end

    async def is_cancelled() -> bool:
        return await gateway.followed_requests() == 0

    await eventually(is_cancelled)
    writer.close()


async def test_a_compressed_body_is_decoded(gateway: RunningGateway) -> None:
    def sent(encoding: str, body: bytes) -> bytes:
        return post(f"Content-Encoding: {encoding}", "Connection: close", body=body)

    assert statuses(await talk(gateway, sent("gzip", gzip.compress(BODY)))) == [200]
    bomb = gzip.compress(b" " * 20_000_000)
    assert statuses(await talk(gateway, sent("gzip", bomb))) == [413]
    unknown = await talk(gateway, sent("br", BODY))
    assert statuses(unknown) == [415]
    assert b"Content-Encoding" in unknown


async def test_a_slash_behind_a_path_changes_nothing(gateway: RunningGateway) -> None:
    """A redirect made of the Host header would send prompt and key in the clear behind TLS."""
    body = {"model": "mock", "prompt": "hi", "max_tokens": 2}
    answer = await gateway.request("POST", "/v1/completions/", body)
    assert (answer.status, "location" in answer.headers) == (200, False)


@pytest.mark.parametrize(
    ("method", "path", "key", "body"),
    [
        ("GET", "/healthz", None, None),
        ("GET", "/health", None, None),
        ("GET", "/version", None, None),
        ("GET", "/nope", None, None),
        ("GET", "/v1/completions", KEY, None),
        ("GET", "/v1/models", "sk-unknown", None),
        ("POST", "/v1/completions", KEY, {"model": "nope", "prompt": "x"}),
        ("POST", "/v1/completions", KEY, json.loads(STREAM)),
    ],
)
async def test_every_answer_has_a_request_id(
    gateway: RunningGateway, method: str, path: str, key: str | None, body: object
) -> None:
    answer = await gateway.request(method, path, body, key=key)
    assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize("stream", [False, True])
async def test_an_accepted_request_that_fails_has_its_own_id(
    gateway: RunningGateway, stream: bool
) -> None:
    """`millstream why` explains it; streamed or not, status and error are the same."""
    answer = await gateway.complete(deadline_ms=1, stream=stream, headers={"Idempotency-Key": "d"})
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    again = await gateway.complete(deadline_ms=1, stream=stream, headers={"Idempotency-Key": "d"})
    assert again.headers["x-request-id"] == answer.headers["x-request-id"]


async def test_health_and_version_are_told_where_clients_look(gateway: RunningGateway) -> None:
    health = await gateway.request("GET", "/health", key=None)
    assert health.json == {"status": "ok"}
    assert (await gateway.request("GET", "/version", key=None)).json["version"]


async def test_pages_of_configured_origins_may_call(gateway: RunningGateway) -> None:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,idempotency-key",
    }
    preflight = await gateway.request("OPTIONS", "/v1/completions", key=None, headers=asked)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "idempotency-key" in preflight.headers["access-control-allow-headers"]
    answer = await gateway.complete(headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    other = await gateway.complete(headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_a_client_that_leaves_is_no_fault_and_is_counted(gateway: RunningGateway) -> None:
    wanted = {"model": "mock", "prompt": "hi", "max_tokens": 3000, "stream": True}
    cancelled = 'millstream_requests_total{model="mock",outcome="cancelled",tenant="acme"}'

    async def count() -> float:
        text = (await gateway.request("GET", "/metrics", key=None)).body.decode()
        lines = [line for line in text.splitlines() if line.startswith(cancelled)]
        return float(lines[0].split()[-1]) if lines else 0.0

    before = await count()
    exchange = await gateway.open("POST", "/v1/completions", wanted)
    await exchange.read_head()
    await exchange.read_chunk()
    exchange.abort()

    async def is_counted() -> bool:
        return await count() == before + 1

    await eventually(is_counted)

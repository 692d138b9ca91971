"""Bad input: the right status and code, the connection and everyone else unharmed."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from gateway.entrypoints import endpoint
from tests.integration.gateway.conftest import Transport
from tests.support.eventually import eventually
from tests.support.gateways import (
    KEY,
    MSGPACK,
    OTHER_KEY,
    GatewaySocket,
    RunningGateway,
    cell,
    tenants,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETION = {"model": "mock", "prompt": "hello", "max_tokens": 3}
DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE = 10**30


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


BODIES: dict[str, tuple[bytes | dict[str, Any], int, str]] = {
    "no JSON": (b"{", 400, "invalid_request"),
    "nothing": (b"", 400, "invalid_request"),
    "a list": (b"[]", 400, "invalid_request"),
    "null": (b"null", 400, "invalid_request"),
    "a number that no float holds": (b'{"model": 1e999}', 400, "invalid_request"),
    "not a number": (b'{"temperature": NaN}', 400, "invalid_request"),
    "invalid UTF-8": (b'{"model": "\xff"}', 400, "invalid_request"),
    "half a character": (b'{"model": "\\ud800"}', 400, "invalid_request"),
    "deep nesting": (DEEP, 400, "invalid_request"),
    "a deep field": (b'{"model": ' + DEEP + b"}", 400, "invalid_request"),
    "unknown field": ({**COMPLETION, "colour": "red"}, 400, "unknown_field"),
    "many fields": ({f"f{i}": 0 for i in range(70_000)}, 400, "invalid_request"),
    "a deep schema": (
        {**COMPLETION, "structured_outputs": {"json": nested(300)}},
        400,
        "invalid_request",
    ),
    "unsupported value": ({**COMPLETION, "echo": True}, 400, "unsupported_value"),
    "no model": ({"prompt": "x"}, 400, "invalid_request"),
    "no prompt": ({"model": "mock"}, 400, "invalid_request"),
    "a model that is a number": ({**COMPLETION, "model": 7}, 400, "invalid_request"),
    "an empty model": ({**COMPLETION, "model": ""}, 400, "invalid_request"),
    "tokens as a word": ({**COMPLETION, "max_tokens": "many"}, 400, "invalid_request"),
    "tokens as a boolean": ({**COMPLETION, "max_tokens": True}, 400, "invalid_request"),
    "no tokens": ({**COMPLETION, "max_tokens": 0}, 400, "invalid_request"),
    "huge tokens": ({**COMPLETION, "max_tokens": HUGE}, 400, "invalid_request"),
    "a huge seed": ({**COMPLETION, "seed": HUGE}, 400, "invalid_request"),
    "too hot": ({**COMPLETION, "temperature": 2.5}, 400, "invalid_request"),
    "an empty prompt": ({**COMPLETION, "prompt": ""}, 400, "invalid_request"),
    "a prompt of booleans": ({**COMPLETION, "prompt": [True]}, 400, "invalid_request"),
    "a token beyond": ({**COMPLETION, "prompt": [1, 256]}, 400, "token_out_of_range"),
    "a token below": ({**COMPLETION, "prompt": [-1]}, 400, "token_out_of_range"),
    "a huge token": ({**COMPLETION, "prompt": [2**63]}, 400, "token_out_of_range"),
    "a long prompt": ({**COMPLETION, "prompt": "x" * 8193}, 400, "context_length_exceeded"),
    "long output": ({**COMPLETION, "max_tokens": 8192}, 400, "context_length_exceeded"),
    "a deadline of nothing": ({**COMPLETION, "deadline_ms": 0}, 400, "invalid_request"),
    "a late deadline": ({**COMPLETION, "deadline_ms": 600_001}, 400, "invalid_request"),
    "unknown model": ({**COMPLETION, "model": "absent"}, 404, "model_not_found"),
    "unknown version": ({**COMPLETION, "model": "mock@9"}, 404, "model_not_found"),
    "a model that embeds": ({**COMPLETION, "model": "vectors"}, 400, "unsupported_value"),
    "a wildcard": ({**COMPLETION, "model": "*"}, 404, "model_not_found"),
    "a full wildcard": ({**COMPLETION, "model": "mock.>"}, 404, "model_not_found"),
    "dots": ({**COMPLETION, "model": "a.b.c"}, 404, "model_not_found"),
    "a line break": ({**COMPLETION, "model": "a\r\nb"}, 404, "model_not_found"),
    "2 MB": ({**COMPLETION, "prompt": "x" * 2_000_000}, 413, "payload_too_large"),
}

FRAMES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "invalid_request"),
    "a list": ("[]", "invalid_request"),
    "no type": ("{}", "invalid_request"),
    "unknown type": ('{"type": "nope"}', "invalid_request"),
    "a type that is a list": ('{"type": []}', "invalid_request"),
    "deep nesting": (DEEP.decode(), "invalid_request"),
    "no id": ('{"type": "generate", "model": "mock", "prompt": "x"}', "invalid_request"),
    "an id that is a number": ('{"type": "cancel", "id": 7}', "invalid_request"),
    "messages of nothing": (
        json.dumps({"type": "generate", "id": "x", "model": "mock", "messages": [{}] * 200_000}),
        "invalid_request",
    ),
    "a long id": (json.dumps({"type": "cancel", "id": "x" * 129}), "invalid_request"),
    "unknown request": ('{"type": "cancel", "id": "nobody"}', "request_not_found"),
    "a resume of nothing": (
        '{"type": "resume", "id": "r", "request_id": "0a", "after": -1}',
        "request_not_found",
    ),
    "a resume of a wildcard": (
        '{"type": "resume", "id": "r", "request_id": "*", "after": -1}',
        "invalid_request",
    ),
    "unknown field": (
        '{"type": "generate", "id": "x", "model": "mock", "prompt": "x", "colour": 1}',
        "unknown_field",
    ),
    "unknown model": (
        '{"type": "generate", "id": "x", "model": "no.such>*", "prompt": "x"}',
        "model_not_found",
    ),
    "a late deadline": (
        '{"type": "generate", "id": "x", "model": "mock", "prompt": "x", "deadline_ms": 600001}',
        "invalid_request",
    ),
    "a model that does not classify": (
        '{"type": "classify", "id": "x", "model": "vectors", "input": "x"}',
        "unsupported_value",
    ),
    "too large": (json.dumps({"type": "generate", "prompt": "x" * 2_000_000}), "payload_too_large"),
    "too large in bytes alone": (
        json.dumps({"prompt": "ü" * 600_000}, ensure_ascii=False),
        "payload_too_large",
    ),
}

PACKED: dict[str, bytes] = {
    "nothing": b"",
    "half a map": b"\x81",
    "text": b'{"type": "cancel"}',
    "a list": msgpack.packb([1]),
    "an extension": msgpack.packb(msgpack.ExtType(5, b"x")),
    "an extension within": msgpack.packb({"type": msgpack.ExtType(5, b"x")}),
    "a time": msgpack.packb({"type": "generate", "id": msgpack.Timestamp(1)}),
    "keys that are numbers": msgpack.packb({1: 2}),
    "keys that are bytes": msgpack.packb({b"type": "cancel", b"id": "x"}),
    "keys of both kinds": msgpack.packb({"type": "cancel", "id": "x", b"y": 1}),
    "invalid UTF-8": b"\x81\xa4type\xa2\xff\xff",
    "deep nesting": b"\x91" * 100_000 + b"\xc0",
    "not a number": msgpack.packb(
        {"type": "generate", "id": "x", "model": "mock", "prompt": "x", "top_p": float("nan")}
    ),
    "bytes in a schema": msgpack.packb(
        {
            "type": "generate",
            "id": "x",
            "model": "mock",
            "prompt": "x",
            "structured_outputs": {"json": {"const": b"x"}},
        }
    ),
    "bytes for text": msgpack.packb(
        {"type": "generate", "id": "x", "model": b"mock", "prompt": "x"}
    ),
    "a length that is not there": b"\xc6\xff\xff\xff\xff",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(shared_nats_url: str, transport: Transport) -> AsyncIterator[RunningGateway]:
    """One for all these tests: whatever they send must leave it unharmed."""
    limits = tenants(max_prompt_tokens=8192, max_output_tokens=8192)
    async with cell(shared_nats_url, tenants=limits, **transport) as (gateway,):
        yield gateway


@pytest.mark.parametrize("what", BODIES)
async def test_a_bad_body_gets_its_status_and_code(gateway: RunningGateway, what: str) -> None:
    """A program must know what to change, a person too."""
    body, status, code = BODIES[what]
    answer = await gateway.request("POST", "/v1/completions", body)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert len(answer.error["message"]) > 10
    assert set(answer.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("what", FRAMES)
async def test_a_bad_frame_is_answered_and_harms_nothing(
    gateway: RunningGateway, what: str
) -> None:
    """The socket and a request that runs on it go on, to the last token."""
    frame, code = FRAMES[what]
    async with gateway.socket() as socket:
        await socket.generate("runs", max_tokens=30)
        await socket.connection.send(frame)
        frames: list[dict[str, Any]] = []
        while not {"error", "done"} <= {frame["type"] for frame in frames}:
            frames.append(await socket.receive())
        (error,) = (frame for frame in frames if frame["type"] == "error")
        assert error["code"] == code
        assert error.get("id") != "runs"
        assert [f["type"] for f in frames if f.get("id") == "runs"][-1] == "done"


@pytest.mark.parametrize("what", PACKED)
async def test_a_bad_msgpack_frame_is_answered(gateway: RunningGateway, what: str) -> None:
    """msgpack can hold what JSON cannot."""
    async with gateway.socket(MSGPACK) as socket:
        await socket.connection.send(PACKED[what])
        error = await socket.receive()
        assert (error["type"], error["code"]) == ("error", "invalid_request")
        await serves(socket)


async def serves(socket: GatewaySocket) -> None:
    await socket.generate("after", max_tokens=2)
    assert (await socket.receive_rest("after"))[-1]["type"] == "done"


async def test_a_frame_of_the_other_kind_is_refused(gateway: RunningGateway) -> None:
    """The subprotocol says whether frames are text or binary."""
    frame = {"type": "generate", "id": "x", "model": "mock", "prompt": "x"}
    async with gateway.socket() as socket:
        for data in (json.dumps(frame).encode(), msgpack.packb(frame), b"\xff"):
            await socket.connection.send(data)
            assert (await socket.receive())["code"] == "invalid_request"
        await serves(socket)
    async with gateway.socket(MSGPACK) as socket:
        await socket.connection.send(json.dumps(frame))
        assert (await socket.receive())["code"] == "invalid_request"
        await serves(socket)


async def test_invalid_utf8_in_a_text_frame_ends_that_socket_alone(gateway: RunningGateway) -> None:
    """RFC 6455 §8.1 leaves no choice: such a connection fails, with 1007."""
    async with gateway.socket() as other, gateway.socket() as socket:
        await other.generate("runs", max_tokens=30)
        await socket.connection.send(b"\xff\xfe", text=True)
        with pytest.raises(ConnectionClosedError) as closed:
            await socket.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1007
        assert (await other.receive_rest("runs"))[-1]["type"] == "done"


async def test_an_id_in_use_is_refused_and_its_request_goes_on(gateway: RunningGateway) -> None:
    """Two streams under one id could not be told apart; afterwards the id is free again."""
    async with gateway.socket() as socket:
        await socket.generate("a", max_tokens=300)
        await socket.receive_until("a", "chunk")
        await socket.generate("a", "another")
        error = (await socket.receive_until("a", "error"))[-1]
        assert "in use" in error["message"]
        assert (await socket.receive_rest("a"))[-1]["usage"]["completion_tokens"] == 300
        await socket.generate("a", max_tokens=2)
        assert (await socket.receive_rest("a"))[-1]["type"] == "done"


async def test_a_flood_of_bad_frames_does_not_delay_others(gateway: RunningGateway) -> None:
    """One client's nonsense is its own."""
    async with gateway.socket() as bad, gateway.socket() as good:
        for _ in range(2000):
            await bad.connection.send("{")
        await serves(good)
        for _ in range(2000):
            assert (await bad.receive())["code"] == "invalid_request"
        await serves(bad)


@pytest.mark.parametrize("key", [None, "", "sk-nope", "ä"])
async def test_without_a_known_key_nobody_comes_in(
    gateway: RunningGateway, key: str | None
) -> None:
    """401 on every path that costs or tells anything."""
    answers = await asyncio.gather(
        gateway.request("POST", "/v1/completions", COMPLETION, key=key),
        gateway.request("POST", "/v1/chat/completions", b"{", key=key),
        gateway.request("POST", "/v1/embeddings", b"{", key=key),
        gateway.request("GET", "/v1/models", key=key),
        gateway.request("GET", "/v1/models/mock", key=key),
    )
    assert {(a.status, a.error["code"]) for a in answers} == {(401, "invalid_api_key")}


@pytest.mark.parametrize("key", ["", "sk-nope"])
async def test_a_handshake_without_a_known_key_is_a_401(gateway: RunningGateway, key: str) -> None:
    """With a body that says why, before any WebSocket exists."""
    with pytest.raises(InvalidStatus) as refused:
        async with gateway.socket(key=key):
            raise AssertionError
    assert refused.value.response.status_code == 401
    body = json.loads(refused.value.response.body or b"")
    assert body["error"]["code"] == "invalid_api_key"


async def test_a_browser_brings_its_key_as_a_subprotocol(gateway: RunningGateway) -> None:
    """It cannot set headers, and a key must not be in a URL; it is not echoed either."""
    url = f"{gateway.url.replace('http', 'ws')}/v1/stream"
    async with connect(url, subprotocols=[f"bearer.{KEY}", MSGPACK]) as connection:  # type: ignore[list-item]
        assert connection.subprotocol == MSGPACK
        await serves(GatewaySocket(connection))
    with pytest.raises(InvalidStatus, match="401"):
        await connect(f"{url}?key={KEY}")


async def test_an_unknown_subprotocol_is_a_400(gateway: RunningGateway) -> None:
    """Better refused than spoken to in the wrong tongue; who names none gets JSON."""
    with pytest.raises(InvalidStatus, match="400"):
        async with gateway.socket("millstream.v9.json"):
            raise AssertionError
    async with gateway.socket(None) as socket:
        await serves(socket)


async def test_a_wrong_method_is_a_405_and_a_wrong_path_a_404(gateway: RunningGateway) -> None:
    """In the shape of every other error, with the methods that are allowed."""
    wrong = await gateway.request("GET", "/v1/completions")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    for path in ("/v2/completions", "/v1/completions/x", "/page/../context.py", "/page/none"):
        absent = await gateway.request("GET", path)
        assert (absent.status, absent.error["code"]) == (404, "not_found")
    missing = await gateway.request("GET", "/v1/models/absent*")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_a_body_is_refused_by_its_announced_length(gateway: RunningGateway) -> None:
    """Before a byte of it is read; one without a length is refused once it is over the limit."""
    exchange = await gateway.open(
        "POST", "/v1/completions", headers={"Content-Length": "9000000000"}
    )
    assert (await exchange.read_head()).status == 413
    exchange.abort()
    chunks = b"%x\r\n%s\r\n" % (500_000, b"x" * 500_000) * 3 + b"0\r\n\r\n"
    headers = {"Transfer-Encoding": "chunked"}
    assert (await gateway.request("POST", "/v1/completions", chunks, headers=headers)).status == 413


async def test_a_body_that_never_ends_is_given_up(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is not kept for a client that says nothing more; one that leaves is no fault."""
    monkeypatch.setattr(endpoint, "BODY_TIMEOUT_SECONDS", 0.1)
    headers = {"Content-Length": "100"}
    exchange = await gateway.open("POST", "/v1/completions", b"{", headers=headers)
    assert (await exchange.read_head()).status == 408
    assert json.loads(await exchange.read_body())["error"]["code"] == "request_timeout"
    exchange.abort()


async def test_a_client_that_leaves_in_its_body_is_no_fault_of_ours(
    gateway: RunningGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would fill the log with errors."""
    headers = {"Content-Length": "100"}
    exchange = await gateway.open("POST", "/v1/completions", b"{", headers=headers)
    await serves_http(gateway)
    exchange.abort()
    seen = ""

    def is_told() -> bool:
        nonlocal seen
        seen += capsys.readouterr().out
        return "client_left" in seen

    await eventually(is_told)
    assert "request_failed" not in seen


async def serves_http(gateway: RunningGateway) -> None:
    assert (await gateway.complete()).status == 200


@pytest.mark.parametrize("key", ["", "x" * 257])
async def test_an_idempotency_key_has_a_sensible_length(gateway: RunningGateway, key: str) -> None:
    """An empty one would make all careless clients' requests the same."""
    answer = await gateway.complete(headers={"Idempotency-Key": key})
    assert (answer.status, answer.error["param"]) == (400, "Idempotency-Key")


async def test_limits_of_one_tenant_are_not_anothers(gateway: RunningGateway) -> None:
    """The configuration bounds `acme` only."""
    for prompt, status in (("x" * 8000, 200), ("x" * 8193, 400)):
        assert (await gateway.complete(prompt, max_tokens=1, key=OTHER_KEY)).status == status

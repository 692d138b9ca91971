"""What a managed key may do at a gateway, and how changes of it reach what is open."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from websockets.exceptions import InvalidStatus

import gateway.service as gateway_service
from gateway.settings import GatewaySettings
from millstream_client import Client, KeyRevoked
from registry.credentials.keys import BUCKET
from streams.accounts.access import UserClass
from streams.base_settings import TenantSettings
from streams.broker.broker_client import StreamMissing
from streams.records.key_use import read_last_uses
from tests.integration.gateway.test_revoked_keys import closing
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, HttpResponse, RunningGateway, cell, gateways, tenants
from tests.support.keys import PEPPER, Operator, operator, pepper_file
from tests.support.services import command_settings

SLOW = {"itl_ms": 20}


@asynccontextmanager
async def managed(
    nats_url: str, folder: Path, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, Operator]]:
    """A cell, and an operator of its keys."""
    settings.setdefault("key_pepper_file", pepper_file(folder))
    async with (
        cell(nats_url, mock=SLOW, **settings) as (gateway,),
        operator(nats_url) as op,
    ):
        yield gateway, op


async def answer(
    gateway: RunningGateway, key: str, method: str = "GET", **body: Any
) -> HttpResponse:
    """A list of models, or a completion."""
    if method == "GET":
        return await gateway.request("GET", "/v1/models", key=key)
    return await gateway.complete(key=key, **{"max_tokens": 1, **body})


def code_of(response: HttpResponse) -> tuple[int, str]:
    return response.status, response.error["code"]


async def known(gateway: RunningGateway, op: Operator, **rights: Any) -> str:
    """A new key that the gateway has heard of."""
    text, _ = await op.create(**rights)

    async def is_known() -> bool:
        return (await answer(gateway, text)).status != 401

    await eventually(is_known)
    return text


async def test_a_key_may_do_what_its_scopes_say(nats_url: str, tmp_path: Path) -> None:
    """By the route that serves the request, and for each kind of connection."""
    async with managed(nats_url, tmp_path) as (gateway, op):
        every = await known(gateway, op)
        assert (await answer(gateway, every)).status == 200
        assert (await answer(gateway, every, "POST")).status == 200
        reads = await known(gateway, op, scopes=("models:read",))
        assert (await answer(gateway, reads)).status == 200
        refused = await answer(gateway, reads, "POST")
        assert code_of(refused) == (403, "insufficient_scope")
        assert "'infer'" in refused.error["message"]
        with pytest.raises(InvalidStatus) as raised:
            async with gateway.socket(key=reads):
                pass
        assert raised.value.response.status_code == 403
        infers = await known(gateway, op, scopes=("infer",))
        assert code_of(await answer(gateway, infers)) == (403, "insufficient_scope")
        sly = await gateway.request(
            "GET",
            "/v1/models?path=/v1/completions",
            key=infers,
            headers={"Host": "x/v1/completions"},
        )
        assert code_of(sly) == (403, "insufficient_scope")


async def test_a_key_may_use_the_models_that_it_names(nats_url: str, tmp_path: Path) -> None:
    """Others are neither served nor listed."""
    async with managed(nats_url, tmp_path) as (gateway, op):
        key = await known(gateway, op, models=("mock",))
        listed = (await answer(gateway, key)).json["data"]
        assert [model["id"] for model in listed] == ["mock"]
        assert (await answer(gateway, key, "POST")).status == 200
        body = {"model": "vectors", "input": "a"}
        refused = await gateway.request("POST", "/v1/embeddings", body, key=key)
        assert code_of(refused) == (403, "model_not_allowed")
        shown = await gateway.request("GET", "/v1/models/vectors", key=key)
        assert code_of(shown) == (403, "model_not_allowed")
        async with gateway.socket(key=key) as socket:
            await socket.send(type="embed", id="1", model="vectors", input="a")
            (error,) = await socket.receive_rest("1")
            assert error["code"] == "model_not_allowed"
            await socket.generate("2", max_tokens=1)
            assert (await socket.receive_rest("2"))[-1]["type"] == "done"


async def test_a_key_is_refused_from_elsewhere_later_and_when_it_is_wrong(
    nats_url: str, tmp_path: Path
) -> None:
    """Each with its own code."""
    async with managed(nats_url, tmp_path) as (gateway, op):
        here = await known(gateway, op, networks=("127.0.0.0/8", "fd00::/8"))
        assert (await answer(gateway, here)).status == 200
        elsewhere, _ = await op.create(networks=("10.0.0.0/8",))
        expired, _ = await op.create(expires_at=op.now - 1)
        disabled, record = await op.create()
        await op.keys.set_disabled(record.id, is_disabled=True)
        orphan, _ = await op.create(tenant="nobody")
        last = await known(gateway, op)
        codes = [
            code_of(await answer(gateway, each)) for each in (elsewhere, expired, disabled, orphan)
        ]
        assert codes == [
            (403, "address_not_allowed"),
            (401, "key_expired"),
            (401, "key_revoked"),
            (401, "key_revoked"),
        ]
        whole = last[:20] + ("a" if last[20] != "a" else "b") + last[21:]
        mistyped = await answer(gateway, whole)
        assert code_of(mistyped) == (401, "invalid_api_key")
        assert "checksum" in mistyped.error["message"]
        assert (await answer(gateway, KEY)).status == 200


async def test_a_gateway_with_another_pepper_or_none_takes_no_managed_key(
    nats_url: str, tmp_path: Path
) -> None:
    """It says so; keys of the configuration work."""
    other = tmp_path / "other"
    other.write_text("another pepper of thirty-two bytes")
    async with operator(nats_url) as op:
        text, _ = await op.create()
    for file, why in ((other, "another pepper"), (None, "given no pepper")):
        async with gateways(nats_url, key_pepper_file=file) as (gateway,):
            refused = await answer(gateway, text)
            assert code_of(refused) == (401, "invalid_api_key")
            assert why in refused.error["message"]
            assert (await answer(gateway, KEY)).status == 200


async def test_a_revoked_key_cuts_sockets_and_streams_everywhere(
    nats_url: str, tmp_path: Path
) -> None:
    """The WebSocket with 1008, the event stream with an error; nothing runs on."""
    async with (
        cell(nats_url, 2, mock=SLOW, key_pepper_file=pepper_file(tmp_path)) as (first, second),
        operator(nats_url) as op,
    ):
        text, record = await op.create()
        for each in (first, second):
            await eventually(lambda each=each: _is_served(each, text))  # type: ignore[misc]
        async with first.socket(key=text) as socket, second.socket(key=text) as idle:
            await socket.generate("1", max_tokens=8000)
            await socket.receive_until("1", "chunk")
            body = {"model": "mock", "prompt": "a", "max_tokens": 8000, "stream": True}
            headers = {"Idempotency-Key": "k"}
            stream = await second.open("POST", "/v1/completions", body, key=text, headers=headers)
            await stream.read_head()
            await stream.read_chunk()
            whole = await first.open("POST", "/v1/completions", {**body, "stream": False}, key=text)

            async def is_followed() -> bool:
                return await first.followed_requests() == 2

            await eventually(is_followed)
            await op.keys.revoke(record.id, op.now)
            assert await closing(socket) == await closing(idle) == (1008, "key_revoked")
            assert b'"code":"key_revoked"' in await stream.read_body()
            assert (await whole.read_head()).status == 401

            async def is_followed_no_more() -> bool:
                return await first.followed_requests() + await second.followed_requests() == 0

            await eventually(is_followed_no_more)
            assert code_of(await answer(first, text)) == (401, "key_revoked")
            for exchange in (stream, whole):
                exchange.abort()


async def _is_served(gateway: RunningGateway, key: str) -> bool:
    return (await answer(gateway, key)).status == 200


async def test_an_expired_key_cuts_its_socket(nats_url: str, tmp_path: Path) -> None:
    """Though nothing was changed, and nothing was sent."""
    async with managed(nats_url, tmp_path) as (gateway, op):
        text = await known(gateway, op)
        (record,) = op.keys.all.values()
        async with gateway.socket(key=text) as socket:
            await op.keys.rotate(record.id, PEPPER, op.now, 3)
            assert await closing(socket) == (1008, "key_expired")


async def test_what_a_key_may_do_changes_while_its_socket_is_open(
    nats_url: str, tmp_path: Path
) -> None:
    """Models from the next request on; without the scope the socket is closed."""
    async with managed(nats_url, tmp_path) as (gateway, op):
        text = await known(gateway, op)
        (record,) = op.keys.all.values()
        async with gateway.socket(key=text) as socket:
            await socket.generate("1", max_tokens=1)
            await socket.receive_rest("1")
            await op.keys.create(record.model_copy(update={"models": ("vectors",)}))

            async def is_limited() -> bool:
                return (await answer(gateway, text, "POST")).status == 403

            await eventually(is_limited)
            await socket.generate("2", max_tokens=1)
            assert (await socket.receive_rest("2"))[-1]["code"] == "model_not_allowed"
            await op.keys.create(record.model_copy(update={"scopes": ("models:read",)}))
            assert await closing(socket) == (1008, "insufficient_scope")


async def test_the_client_says_why_it_was_cut(nats_url: str, tmp_path: Path) -> None:
    """And does not come again with that key."""
    async with managed(nats_url, tmp_path) as (gateway, op):
        text = await known(gateway, op)
        (record,) = op.keys.all.values()
        async with Client(gateway.url, api_key=text) as client:
            stream = client.generate(model="mock", prompt="hello", max_tokens=8000)
            await anext(stream)
            await op.keys.revoke(record.id, op.now)
            with pytest.raises(KeyRevoked, match="revoked"):
                await stream.text()
            await eventually(lambda: client.gateway is None)


async def test_keys_outlive_their_bucket(nats_url: str, tmp_path: Path) -> None:
    """A gateway goes on with what it knows, and the bucket comes back with it."""
    async with managed(nats_url, tmp_path) as (gateway, op):
        text = await known(gateway, op)
        async with connect(nats_url, "vandal") as broker:
            await broker.js.delete_stream(f"KV_{BUCKET}")
            assert await _is_served(gateway, text)

            async def is_back() -> bool:
                with suppress(StreamMissing):
                    return bool(await broker.read_subject(f"KV_{BUCKET}", f"$KV.{BUCKET}.>"))
                return False

            await eventually(is_back)
        assert await _is_served(gateway, text)


async def test_uses_of_a_key_are_counted(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then, by every gateway; the last time is known to within that."""
    monkeypatch.setattr(gateway_service, "KEY_USE_SECONDS", 0.05)
    async with managed(nats_url, tmp_path) as (running, op):
        await known(running, op)
        (record,) = op.keys.all.values()
        async with connect(nats_url, "test") as broker:

            async def last_use() -> float | None:
                return (await read_last_uses(broker)).get(record.id)

            assert abs(await eventually(last_use) - op.now) < 3600


@pytest.mark.parametrize("key", ["sk-acme", "sk-change-me-please-change-me-please"])
async def test_a_weak_key_opens_no_gateway_to_strangers(nats_url: str, key: str) -> None:
    """It does not start, and says which key it is without telling it."""
    async with gateways(nats_url, tenants={"acme": TenantSettings(keys=(key,))}) as (gateway,):
        assert (await answer(gateway, key)).status == 200
    told = command_settings(nats_url, UserClass.GATEWAY)
    settings = GatewaySettings(**told, host="0.0.0.0", port=0)
    with pytest.raises(gateway_service.WeakKeys, match="of tenant 'acme'.*0.0.0.0") as raised:
        await gateway_service.run(settings, asyncio.Event())
    assert key not in str(raised.value)


async def test_a_weak_key_that_is_stored_later_is_refused(nats_url: str, tmp_path: Path) -> None:
    """The start is not the only moment at which keys come in."""
    strong = "sk-5b1f0c7e94d24a7d8c6f3b2a1e0d9c8b7a6f5e4d3c2b1a09"
    settings: dict[str, Any] = {
        "host": "0.0.0.0",
        "tenants": {"acme": TenantSettings(keys=(strong,))},
    }
    async with gateways(nats_url, **settings) as (gateway,), gateways(nats_url, tenants=tenants()):

        async def is_refused_as_weak() -> bool:
            refused = await answer(gateway, KEY)
            assert code_of(refused) == (401, "invalid_api_key")
            return "loopback" in refused.error["message"]

        await eventually(is_refused_as_weak)


async def complete_with_openai(gateway: RunningGateway, key: str) -> str | None:
    url = f"{gateway.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        made = await client.completions.create(model="mock", prompt="a", max_tokens=1)
        return made.choices[0].finish_reason


async def complete_with_langchain(gateway: RunningGateway, key: str) -> str | None:
    async with httpx2.AsyncClient() as connections:
        chat = ChatOpenAI(
            base_url=f"{gateway.url}/v1",
            api_key=SecretStr(key),
            model="mock",
            max_completion_tokens=1,
            max_retries=0,
            http_async_client=connections,
        )
        made = await chat.ainvoke("a")
        reason: str = made.response_metadata["finish_reason"]
        return reason


@pytest.mark.parametrize("complete", [complete_with_openai, complete_with_langchain])
async def test_clients_tell_scoped_expired_and_rotated_keys_apart(
    nats_url: str,
    tmp_path: Path,
    complete: Callable[[RunningGateway, str], Awaitable[str | None]],
) -> None:
    """By their own classes of errors; a rotated key works beside its successor, and ends."""
    async with managed(nats_url, tmp_path) as (gateway, op):
        old = await known(gateway, op)
        (record,) = op.keys.all.values()
        text, _ = await op.keys.rotate(record.id, PEPPER, op.now, 3600)
        await eventually(lambda: _is_served(gateway, str(text)))
        assert await complete(gateway, old) == await complete(gateway, str(text)) == "length"
        await op.keys.revoke(record.id, op.now)
        scoped, _ = await op.create(scopes=("models:read",))
        other, _ = await op.create(models=("vectors",))
        expired, _ = await op.create(expires_at=op.now - 1)
        await known(gateway, op)
        for key, error, code in (
            (scoped, openai.PermissionDeniedError, "insufficient_scope"),
            (other, openai.PermissionDeniedError, "model_not_allowed"),
            (expired, openai.AuthenticationError, "key_expired"),
            (old, openai.AuthenticationError, "key_revoked"),
        ):
            with pytest.raises(error) as refused:
                await complete(gateway, key)
            assert refused.value.code == code

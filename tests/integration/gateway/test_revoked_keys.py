"""A key that is removed, or whose tenant is, ends what was opened with it."""

from contextlib import suppress
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from api import wrong_keys
from millstream_client import Client, Unauthenticated
from registry.tenants import Tenants
from streams.base_settings import TenantSettings
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import (
    KEY,
    OTHER_KEY,
    GatewaySocket,
    RunningGateway,
    cell,
    gateways,
    tenants,
)

SLOW = {"itl_ms": 20}
OTHER = {"other": tenants()["other"]}
WITHOUT_KEY = {"acme": TenantSettings(keys=("sk-new",), publishes=True), **OTHER}


async def configure(nats_url: str, configured: dict[str, TenantSettings]) -> None:
    """Replace all tenants, as another gateway with other settings does."""
    async with connect(nats_url, "test") as broker:
        opened = await Tenants.open(broker)
        await opened.apply_config(configured)
        await opened.close()


async def closing(socket: GatewaySocket) -> tuple[int | None, str | None]:
    """The code and reason with which the gateway closes a socket."""
    while socket.connection.close_code is None:
        with suppress(ConnectionClosed):
            await socket.receive()
    return socket.connection.close_code, socket.connection.close_reason


@pytest.mark.parametrize("left", [WITHOUT_KEY, OTHER], ids=["key", "tenant"])
async def test_it_closes_open_websockets(nats_url: str, left: dict[str, Any]) -> None:
    """One with a running stream and one on which nothing happens; other tenants' stay open."""
    async with (
        cell(nats_url, mock=SLOW) as (gateway,),
        gateway.socket() as busy,
        gateway.socket() as idle,
        gateway.socket(key=OTHER_KEY) as other,
    ):
        await busy.generate("1", max_tokens=8000)
        await busy.receive_until("1", "chunk")
        await configure(nats_url, left)
        assert await closing(busy) == await closing(idle) == (1008, "key_revoked")

        async def is_followed_no_more() -> bool:
            return await gateway.followed_requests() == 0

        await eventually(is_followed_no_more)
        await other.generate("1", max_tokens=2)
        assert (await other.receive_rest("1"))[-1]["finish_reason"] == "length"


async def test_a_key_that_stays_keeps_its_socket_when_limits_change(nats_url: str) -> None:
    """A change of the tenants' settings is no reason to lose a stream."""
    async with cell(nats_url, mock=SLOW) as (gateway,), gateway.socket() as socket:
        await configure(nats_url, {**tenants(weight=2.0), "third": TenantSettings(keys=("sk-3",))})
        await eventually(lambda: _is_known(gateway, "sk-3"))
        await socket.generate("1", max_tokens=2)
        assert (await socket.receive_rest("1"))[-1]["finish_reason"] == "length"


async def _is_known(gateway: RunningGateway, key: str) -> bool:
    return (await gateway.request("GET", "/v1/models", key=key)).status == 200


async def test_who_tries_keys_is_counted_and_slowed(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP and in handshakes alike; a client whose key was right before is served."""
    monkeypatch.setattr(wrong_keys, "PER_SECOND", 0.001)
    async with gateways(nats_url) as (gateway,):
        assert await _is_known(gateway, KEY)
        tries = [await gateway.request("GET", "/v1/models", key=f"sk-{n}") for n in range(30)]
        assert {tries[0].status, tries[20].status} == {401}
        last = tries[-1]
        assert (last.status, last.error["code"]) == (429, "too_many_wrong_keys")
        assert int(last.headers["retry-after"]) >= 1
        with pytest.raises(InvalidStatus) as raised:
            async with gateway.socket(key="sk-wrong"):
                pass
        assert raised.value.response.status_code == 429
        assert await _is_known(gateway, KEY)
        metrics = (await gateway.request("GET", "/metrics", key=None)).body.decode()
        for entry_point in ("http", "websocket"):
            assert f'millstream_unauthenticated_total{{entry_point="{entry_point}"}}' in metrics


async def test_the_client_fails_its_requests_and_connects_no_more(nats_url: str) -> None:
    """A client that tried again would meet the same refusal for ever."""
    async with cell(nats_url, mock=SLOW) as (gateway,):
        async with Client(gateway.url, api_key=KEY) as client:
            stream = client.generate(model="mock", prompt="hello", max_tokens=8000)
            await anext(stream)
            await configure(nats_url, OTHER)
            with pytest.raises(Unauthenticated, match="revoked"):
                await stream.text()
            await eventually(lambda: client.gateway is None)

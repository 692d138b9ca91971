"""`millstream bench` as a load that meets what happens to a gateway meanwhile."""

import asyncio

import pytest

from millstream.bench.load_client import KeyRefused
from millstream.bench.load_generator import run
from millstream.bench.settings import BenchSettings
from registry.tenants import Tenants
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, cell, tenants


@pytest.mark.parametrize("protocol", ["ws", "sse"])
async def test_a_key_that_is_removed_ends_the_load(nats_url: str, protocol: str) -> None:
    """All that is sent until its end would be refused, and the report would say nothing."""
    async with cell(nats_url) as (gateway,):
        given = {"url": gateway.url, "api_key": KEY, "protocol": protocol, "json": True}
        settings = BenchSettings.model_validate({**given, "duration": 3600, "warmup": 0})
        load = asyncio.create_task(run(settings, asyncio.Event()))
        try:
            await eventually(gateway.followed_requests)
            await _remove_tenant(nats_url, "acme")
            with pytest.raises(ExceptionGroup) as raised:
                await load
            assert raised.group_contains(KeyRefused, match="does not know the API key")
        finally:
            load.cancel()


async def _remove_tenant(nats_url: str, name: str) -> None:
    async with connect(nats_url, "test") as broker:
        opened = await Tenants.open(broker)
        await opened.apply_config({k: v for k, v in tenants().items() if k != name})
        await opened.close()

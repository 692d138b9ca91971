"""Tenants: declared from a configuration, known by hashes alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import SecretStr

from registry.tenant_records import Tenant
from registry.tenants import KeyTaken, Tenants, hash_key
from streams.base_settings import TenantSettings
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.services import always


@asynccontextmanager
async def tenants_at(url: str) -> AsyncIterator[Tenants]:
    async with connect(url, "test") as broker:
        tenants = await Tenants.open(broker, declares=always)
        try:
            yield tenants
        finally:
            await tenants.close()


def settings(*keys: str, weight: float = 1) -> TenantSettings:
    return TenantSettings.model_validate({"keys": keys, "weight": weight})


def name_of(tenants: Tenants, key: str) -> str | None:
    tenant = tenants.authenticate(key)
    return tenant.name if tenant else None


async def test_a_key_leads_to_its_tenant_in_every_gateway(nats_url: str) -> None:
    """The tenant comes from the credential; any gateway must know it."""
    async with tenants_at(nats_url) as declaring, tenants_at(nats_url) as reading:
        await declaring.apply_config(
            {"acme": settings("sk-1", "sk-2", weight=2), "bar": settings("sk-3")}
        )
        await eventually(lambda: len(reading.by_name) == 2 and name_of(reading, "sk-3"))
        assert [name_of(reading, k) for k in ("sk-1", "sk-2", "sk-3")] == [
            "acme",
            "acme",
            "bar",
        ]
        assert reading.authenticate("sk-4") is None
        assert reading.get("acme") == Tenant(name="acme", weight=2)


async def test_a_key_with_quotas_of_its_own_is_known_by_them(nats_url: str) -> None:
    """Any other key means its tenant and nothing more."""
    limited = {"key": "sk-2", "name": "ci", "requests_per_minute": 5}
    configured = {"keys": ["sk-1", limited], "tokens_per_day": 100}
    async with tenants_at(nats_url) as tenants:
        await tenants.apply_config({"acme": TenantSettings.model_validate(configured)})
        plain, through = tenants.authenticate("sk-1"), tenants.authenticate("sk-2")
        assert plain
        assert plain.key
        assert plain.model_copy(update={"key": None}) == tenants.get("acme")
        assert tenants.get("acme") == Tenant(name="acme", tokens_per_day=100)
        assert not plain.key.has_limits
        assert plain.key.name == hash_key("sk-1")[:8]
        assert through
        assert through.key
        assert (through.tokens_per_day, through.key.requests_per_minute) == (100, 5)
        assert {key.name for key in tenants.keys} == {"ci", hash_key("sk-1")[:8]}


async def test_what_left_the_configuration_is_removed(nats_url: str) -> None:
    """A revoked key must stop working; what an operator added elsewhere must not."""
    async with tenants_at(nats_url) as tenants:
        await tenants.upsert(Tenant(name="manual", source="api"), ["sk-m"])
        await tenants.apply_config({"acme": settings("sk-1", "sk-2"), "bar": settings("sk-3")})
        await tenants.apply_config({"acme": settings("sk-2")})
        found = [name_of(tenants, key) for key in ("sk-1", "sk-2", "sk-3", "sk-m")]
        assert found == [None, "acme", None, "manual"]
        assert set(tenants.by_name) == {"acme", "manual"}


async def test_a_key_by_itself_and_a_configuration_leave_each_other_alone(nats_url: str) -> None:
    """`--api-key` is for `default`, who may have keys and a weight in the file too."""
    async with tenants_at(nats_url) as tenants:
        await tenants.apply_api_key(SecretStr("sk-1"))
        await tenants.apply_config({"acme": settings("sk-2")})
        assert [name_of(tenants, key) for key in ("sk-1", "sk-2")] == ["default", "acme"]
        await tenants.apply_config({"default": settings("sk-3", weight=5)})
        await tenants.apply_api_key(SecretStr("sk-4"))
        found = [name_of(tenants, f"sk-{number}") for number in (1, 2, 3, 4)]
        assert found == [None, None, "default", "default"]
        assert tenants.by_name["default"].weight == 5
        await tenants.apply_config({})
        assert name_of(tenants, "sk-4") == "default"
        assert tenants.by_name["default"].weight == 1


async def test_a_key_by_itself_cannot_be_anothers(nats_url: str) -> None:
    """Nor is the tenant made for it then."""
    async with tenants_at(nats_url) as tenants:
        await tenants.apply_config({"acme": settings("sk-1")})
        with pytest.raises(KeyTaken, match=r"'default'.*'acme'"):
            await tenants.apply_api_key(SecretStr("sk-1"))
        assert set(tenants.by_name) == {"acme"}


async def test_gateways_may_declare_at_once(nats_url: str) -> None:
    """All gateways of a cluster start with the same configuration."""
    async with tenants_at(nats_url) as first, tenants_at(nats_url) as second:
        configured = {f"t{i}": settings(f"sk-{i}") for i in range(10)}
        await asyncio.gather(first.apply_config(configured), second.apply_config(configured))
        assert set(first.by_name) == set(second.by_name) == set(configured)


async def test_two_tenants_cannot_share_a_key(nats_url: str) -> None:
    """Whose request is it? And the message must not contain the key."""
    async with tenants_at(nats_url) as tenants:
        with pytest.raises(KeyTaken, match=r"'b'.*'a'") as refused:
            await tenants.apply_config({"a": settings("sk-same"), "b": settings("sk-same")})
        assert "sk-same" not in str(refused.value)
        assert tenants.by_name == {}


async def test_the_bucket_never_holds_a_key(nats_url: str) -> None:
    """Whoever reads the broker's disk learns no credential."""
    async with connect(nats_url, "a") as broker, tenants_at(nats_url) as tenants:
        await tenants.apply_config({"acme": settings("sk-secret")})
        stored = await broker.read_subject("KV_tenants", "$KV.tenants.>")
        assert len(stored) == 2
        assert not any(b"sk-secret" in m.data or "sk-secret" in m.subject for m in stored)


@pytest.mark.parametrize("key", ["", "*", ">", "sk-\udcff", "k" * 100_000])
async def test_any_string_may_be_tried_as_a_key(nats_url: str, key: str) -> None:
    """Keys come from strangers."""
    async with tenants_at(nats_url) as tenants:
        await tenants.apply_config({"acme": settings("sk-1")})
        assert tenants.authenticate(key) is None

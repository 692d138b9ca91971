"""The same operations over NATS, for whoever has the broker's credentials."""

import json
from typing import Any

import pytest

from millstream.admin import admin_client
from millstream.admin.admin_client import AdminRefused, AdminUnreachable, NatsAdminClient, list_all
from streams.broker.broker_client import Broker
from tests.support.accounts_server import connect
from tests.support.admins import running_admin


async def ask(broker: Broker, operation: str, payload: bytes) -> Any:
    answer = await broker.request(f"infer.admin.{operation}", payload, 5)
    assert answer
    return json.loads(answer)


async def test_what_one_door_stores_the_other_shows(nats_url: str) -> None:
    """One set of operations; two services, of which one answers."""
    async with (
        running_admin(nats_url) as first,
        running_admin(nats_url) as second,
        connect(nats_url, "test") as broker,
    ):
        client = NatsAdminClient(broker)
        added = await client.call("tenants.add", name="acme", weight=2)
        assert added["weight"] == 2
        for each in (first, second, client):
            assert [t["name"] for t in await list_all(each, "tenants.list")] == ["acme"]
        with pytest.raises(AdminRefused, match="'acme' exists already") as refused:
            await client.call("tenants.add", name="acme")
        assert refused.value.code == "tenant_exists"


@pytest.mark.parametrize(
    ("operation", "payload", "code"),
    [
        ("tenants.list", b"{", "invalid_request"),
        ("tenants.list", b"[]", "invalid_request"),
        ("tenants.add", b"", "invalid_request"),
        ("tenants.add", b"\xff" * 1000, "invalid_request"),
        ("tenants.add", b'{"name": "a", "limit": 1}', "unknown_field"),
        ("tenants.nothing", b"{}", "not_found"),
        ("a.b.c.d", b"{}", "not_found"),
    ],
)
async def test_garbage_is_answered_with_an_error(
    nats_url: str, operation: str, payload: bytes, code: str
) -> None:
    """Silence would look like a service that is not there."""
    async with running_admin(nats_url) as client, connect(nats_url, "test") as broker:
        answer = await ask(broker, operation, payload)
        assert answer["error"]["code"] == code
        assert await list_all(client, "tenants.list") == []


async def test_where_nobody_answers_the_remedy_is_said(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a moment in which one may be starting."""
    monkeypatch.setattr(admin_client, "FIND_SECONDS", 0.2)
    async with connect(nats_url, "test") as broker:
        with pytest.raises(AdminUnreachable, match="start `millstream admin`"):
            await NatsAdminClient(broker).call("tenants.list")

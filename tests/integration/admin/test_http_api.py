"""The admin API over HTTP: who comes in, what is stored, what is refused."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest
from structlog.testing import capture_logs

from admin.http_server import listen
from api.wrong_keys import BURST
from millstream.admin.admin_client import AdminRefused, HttpAdminClient, list_all
from registry.models import Adapter, Model, mock_model
from streams.base_settings import TenantSettings
from streams.errors import http_status
from tests.support.admins import ADMIN_KEY, running_admin
from tests.support.gateways import HttpResponse, RunningGateway
from tests.support.versions import make_version, with_facts

GARBAGE = [b"", b"{", b"[]", b"null", b"\xff", b'"x"', b'{"name": {}}', b"[" * 100_000]


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[HttpAdminClient]:
    configured = {"acme": TenantSettings(keys=("sk-acme",), weight=2)}
    async with running_admin(nats_url, tenants=configured) as found:
        yield found


def record(name: str = "m", *versions: str) -> dict[str, Any]:
    made = {id: make_version(id) for id in versions or ("1",)}
    first = next(iter(made))
    model = mock_model(name).model_copy(update={"versions": made, "default_version": first})
    return model.model_dump(mode="json")


OTHER_VERSION = record() | {"versions": {"1": {"id": "2"}}}


async def ask(
    client: HttpAdminClient, method: str, path: str, body: object = None, **options: Any
) -> HttpResponse:
    """A request as any HTTP client sends it."""
    port = int(client.url.rpartition(":")[2])
    server = RunningGateway(port, asyncio.Event())  # speaks plain HTTP
    return await server.request(method, path, body, **{"key": ADMIN_KEY, **options})


async def test_models_aliases_and_adapters_come_and_go(client: HttpAdminClient) -> None:
    """A change is answered once it is stored, so the next question sees it."""
    name = "org/m:1"
    await client.call("models.put", name=name, model=record(name), alias="chat")
    await client.call("aliases.put", name="old", model=name, version="1")
    adapter = Adapter(
        name="sql",
        model=name,
        directory="/a",
        files={},
        digest="d",
        rank=2,
        parameters=1,
        targets=["q_proj"],
    ).model_dump(mode="json")
    await client.call("adapters.put", name=f"{name}:sql", adapter=adapter)
    (model,) = await list_all(client, "models.list")
    assert (model["aliases"], [a["name"] for a in model["adapters"]]) == (["chat", "old"], ["sql"])
    shown = await client.call("models.show", name="chat:sql")
    assert (shown["model"], shown["version"], shown["adapter"]["digest"]) == (model, "1", "d")
    assert {a["name"] for a in await list_all(client, "aliases.list")} == {"chat", "old"}
    await client.call("models.remove", name=name)
    assert await list_all(client, "models.list") == await list_all(client, "aliases.list") == []


async def test_tenants_come_change_and_go(client: HttpAdminClient) -> None:
    """Those of the configuration are seen, and are the file's to change."""
    made = await client.call("tenants.add", name="bar", weight=3, tokens_per_day=10)
    assert (made["weight"], made["tokens_per_day"], made["source"]) == (3, 10, "api")
    changed = await client.call("tenants.change", name="bar", max_queued=5, tokens_per_day=None)
    assert (changed["weight"], changed["max_queued"], changed["tokens_per_day"]) == (3, 5, None)
    tenants = {t["name"]: t for t in await list_all(client, "tenants.list")}
    assert (tenants["acme"]["keys"], tenants["bar"]["keys"]) == (1, 0)
    for operation in ("tenants.change", "tenants.remove"):
        with pytest.raises(AdminRefused, match=r"\[tenants.acme\]") as refused:
            await client.call(operation, name="acme")
        assert refused.value.code == "tenant_configured"
    await client.call("tenants.remove", name="bar")
    for operation in ("tenants.show", "tenants.change", "tenants.remove"):
        with pytest.raises(AdminRefused, match="no tenant 'bar'"):
            await client.call(operation, name="bar")


@pytest.mark.parametrize(
    ("operation", "arguments", "status", "code"),
    [
        ("tenants.add", {"name": "acme"}, 409, "tenant_exists"),
        ("tenants.add", {"name": "a", "weight": -1}, 400, "invalid_request"),
        ("tenants.add", {"name": "a", "wieght": 1}, 400, "unknown_field"),
        ("tenants.add", {"name": "a", "max_queued": 10**30}, 400, "invalid_request"),
        ("tenants.add", {"name": ">"}, 400, "invalid_request"),
        ("models.show", {"name": "none"}, 404, "model_not_found"),
        ("models.remove", {"name": "none"}, 404, "model_not_found"),
        ("models.put", {"name": "m", "model": record("n")}, 400, "invalid_request"),
        ("models.put", {"name": "m", "model": OTHER_VERSION}, 400, "invalid_request"),
        ("models.put", {"name": "m", "model": record(), "alias": "m"}, 409, "name_taken"),
        ("models.list", {"limit": 0}, 400, "invalid_request"),
        ("aliases.put", {"name": "a", "model": "none"}, 404, "model_not_found"),
    ],
)
async def test_what_cannot_be_is_refused_with_its_code(
    client: HttpAdminClient, operation: str, arguments: dict[str, Any], status: int, code: str
) -> None:
    """In the shape that all errors of Millstream have; nothing is stored."""
    before = await list_all(client, "models.list"), await list_all(client, "tenants.list")
    with pytest.raises(AdminRefused) as refused:
        await client.call(operation, **arguments)
    assert refused.value.code == code
    assert http_status(code) == status
    after = await list_all(client, "models.list"), await list_all(client, "tenants.list")
    assert after == before


async def test_a_version_with_other_files_is_refused(client: HttpAdminClient) -> None:
    """A version's files never change."""
    await client.call("models.put", name="m", model=record())
    other = record()
    other["versions"]["1"]["digest"] = "other"
    with pytest.raises(AdminRefused, match="exists with other files") as refused:
        await client.call("models.put", name="m", model=other)
    assert refused.value.code == "version_exists"


@pytest.mark.parametrize("body", GARBAGE)
async def test_a_garbage_body_is_the_senders_fault(client: HttpAdminClient, body: bytes) -> None:
    """400, and the service goes on."""
    for method, path in (("POST", "/tenants"), ("PUT", "/models/m"), ("PATCH", "/tenants/acme")):
        answer = await ask(client, method, f"/admin/v1{path}", body)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), path
    assert len(await list_all(client, "tenants.list")) == 1


async def test_a_body_that_is_too_large_is_not_read(client: HttpAdminClient) -> None:
    """Nothing larger could be stored."""
    answer = await ask(client, "PUT", "/admin/v1/models/m", b" " * 1_100_000)
    assert (answer.status, answer.error["code"]) == (413, "payload_too_large")


async def test_a_wrong_address_is_told_from_a_wrong_method(client: HttpAdminClient) -> None:
    """As at the gateway."""
    answers = [
        await ask(client, "GET", "/admin/v1/nothing"),
        await ask(client, "DELETE", "/admin/v1/models"),
        await ask(client, "GET", "/admin/v1/models?limit=1&sort=up"),
    ]
    assert [answer.error["code"] for answer in answers] == [
        "not_found",
        "method_not_allowed",
        "unknown_field",
    ]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/admin/v1/openapi.json"])
async def test_health_and_the_document_need_no_key(client: HttpAdminClient, path: str) -> None:
    """Probes have none, and the document tells nothing of this cell."""
    assert (await ask(client, "GET", path, key=None)).status == 200


async def test_nobody_comes_in_without_the_key(client: HttpAdminClient) -> None:
    """Guesses are counted, logged without the key, and slowed; the holder is not."""
    with capture_logs() as events:
        statuses = [
            (await ask(client, "GET", "/admin/v1/models", key=key)).status
            for key in (None, "sk-wrong", "sk-acme", *(f"guess-{n}" for n in range(BURST)))
        ]
        assert (await ask(client, "GET", "/admin/v1/models")).status == 200
    assert statuses[:3] == [401, 401, 401]
    assert statuses[-1] == 429
    refusals = [event for event in events if event["event"] == "admin_unauthenticated"]
    assert len(refusals) == len(statuses)
    assert "sk-wrong" not in repr(events)


async def test_changes_are_logged_with_who_and_what(client: HttpAdminClient) -> None:
    """The record itself is not: it may hold a server's address."""
    with capture_logs() as events:
        await client.call("tenants.add", name="bar", weight=7.25)
        with pytest.raises(AdminRefused):
            await client.call("tenants.add", name="bar")
    changes = [event for event in events if event["event"] == "admin_change"]
    assert [(e["operation"], e["name"], e["caller"], e["outcome"]) for e in changes] == [
        ("tenants.add", "bar", "admin-key", "done"),
        ("tenants.add", "bar", "admin-key", "tenant_exists"),
    ]
    assert "7.25" not in repr(changes)


async def test_writers_in_a_race_lose_nothing(nats_url: str) -> None:
    """Any number of admin services take changes at once; one of two adders is told."""
    async with running_admin(nats_url) as one, running_admin(nats_url) as other:
        clients = (one, other) * 5
        puts = (
            each.call("models.put", name="m", model=record("m", f"v{number}"))
            for number, each in enumerate(clients)
        )
        await asyncio.gather(*puts)
        adds = (each.call("tenants.add", name="bar", weight=1) for each in (one, other))
        added = await asyncio.gather(*adds, return_exceptions=True)
        for each in (one, other):
            (model,) = await list_all(each, "models.list")
            assert len(model["versions"]) == 10
    assert sorted(type(outcome).__name__ for outcome in added) == ["AdminRefused", "dict"]


async def test_a_list_goes_on_where_a_page_ends(client: HttpAdminClient) -> None:
    """By number, and by bytes where records are large."""
    for number in range(5):
        await client.call("tenants.add", name=f"t{number}")
    first = await client.call("tenants.list", limit=2)
    assert ([t["name"] for t in first["data"]], first["has_more"]) == (["acme", "t0"], True)
    rest = await client.call("tenants.list", after="t0")
    assert ([t["name"] for t in rest["data"]], rest["has_more"]) == (
        ["t1", "t2", "t3", "t4"],
        False,
    )
    for name in ("a", "b"):
        large = with_facts(Model.model_validate(record(name)), chat_template="x" * 150_000)
        await client.call("models.put", name=name, model=large.model_dump(mode="json"))
    page = await client.call("models.list")
    assert ([m["name"] for m in page["data"]], page["has_more"]) == (["a"], True)
    assert len(await list_all(client, "models.list")) == 2


async def test_it_stops_while_a_client_is_connected(nats_url: str) -> None:
    """An idle connection keeps no service from ending."""
    async with running_admin(nats_url) as client:
        port = int(client.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: test\r\n\r\n")
    writer.close()


def test_an_answer_does_not_wait_for_an_acknowledgement() -> None:
    """A body is sent after its head, which Nagle's algorithm would hold back for 40 ms."""
    with closing(listen("127.0.0.1", 0)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

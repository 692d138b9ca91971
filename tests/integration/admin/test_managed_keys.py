"""A managed key opens the admin API for what its scopes allow, as long as it works."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from admin.operation_table import OPERATIONS
from millstream.admin.admin_client import AdminRefused, HttpAdminClient, NatsAdminClient
from registry.credentials.key_format import KeyText
from registry.models import mock_model
from streams.errors import http_status
from tests.support.accounts_server import connect
from tests.support.admins import running_admin
from tests.support.eventually import eventually
from tests.support.gateways import tenants
from tests.support.keys import operator, pepper_file


@pytest.fixture
async def owner(nats_url: str, tmp_path: Path) -> AsyncIterator[HttpAdminClient]:
    """A client with the service's own key."""
    pepper = pepper_file(tmp_path)
    async with running_admin(nats_url, tenants=tenants(), key_pepper_file=pepper) as client:
        yield client


async def holder(owner: HttpAdminClient, *scopes: str, **rights: Any) -> HttpAdminClient:
    """A client with a new managed key."""
    made = await owner.call("keys.create", tenant="acme", scopes=list(scopes), **rights)
    return HttpAdminClient(owner.url, made["key"])


def id_of(client: HttpAdminClient) -> str:
    return client._key.split("_")[1]


async def refusal(client: HttpAdminClient, operation: str, **arguments: Any) -> tuple[int, str]:
    """Status and code of a refusal; 200 for none."""
    try:
        await client.call(operation, **arguments)
    except AdminRefused as refused:
        return http_status(refused.code), refused.code
    return 200, ""


async def is_refused(client: HttpAdminClient, code: str) -> bool:
    return (await refusal(client, "models.list"))[1] == code


@pytest.mark.parametrize(
    ("scopes", "opened"),
    [
        (("admin",), {"admin", "operator"}),
        (("operator",), {"operator"}),
        (("infer", "models:read", "usage:read", "jobs"), set()),
    ],
)
async def test_scopes_decide_which_operations_are_open(
    owner: HttpAdminClient, scopes: tuple[str, ...], opened: set[str]
) -> None:
    """Whatever else is wrong with a request is not told to who may not make it."""
    client = await holder(owner, *scopes)
    for name, operation in OPERATIONS.items():
        found = await refusal(client, name, **dict.fromkeys(operation.path_arguments, "x"))
        is_closed = found == (403, "insufficient_scope")
        assert is_closed == (operation.scope not in opened), name


async def test_the_log_names_who_changed_what_by_the_keys_id(owner: HttpAdminClient) -> None:
    """The log names a caller by the key's id, which is no secret."""
    chief, worker = await holder(owner, "admin"), await holder(owner, "operator")
    with capture_logs() as events:
        await chief.call("tenants.add", name="bar")
        with pytest.raises(AdminRefused, match="needs the scope 'admin'; the key has: operator"):
            await worker.call("tenants.remove", name="bar")
    changes = [
        (each["operation"], each["name"], each["caller"], each["outcome"])
        for each in events
        if each["event"] == "admin_change"
    ]
    assert changes == [
        ("tenants.add", "bar", id_of(chief), "done"),
        ("tenants.remove", "bar", id_of(worker), "insufficient_scope"),
    ]
    assert not any(each._key.split("_")[2] in repr(events) for each in (chief, worker))


async def test_an_operator_sets_no_price_in_a_models_record(owner: HttpAdminClient) -> None:
    """A model without a price in the book costs what its record says."""
    client = await holder(owner, "operator")
    record = mock_model("m").model_dump(mode="json", exclude_unset=True)
    priced = {**record, "prompt_price": 0.0}
    assert await refusal(client, "models.put", name="m", model=priced) == (
        403,
        "insufficient_scope",
    )
    assert await refusal(client, "models.put", name="m", model=record) == (200, "")
    assert await refusal(client, "aliases.put", name="a", model="m") == (200, "")


async def test_a_key_that_was_withdrawn_opens_no_admin_service(
    owner: HttpAdminClient, nats_url: str, tmp_path: Path
) -> None:
    """At once at the one that withdrew it; the others hear of it."""
    async with running_admin(nats_url, key_pepper_file=pepper_file(tmp_path)) as other:
        here = await holder(owner, "admin")
        there = HttpAdminClient(other.url, here._key)
        await eventually(lambda: is_refused(there, ""))
        await owner.call("keys.revoke", id=id_of(here))
        assert await refusal(here, "models.list") == (401, "key_revoked")
        await eventually(lambda: is_refused(there, "key_revoked"))


async def test_a_key_that_ends_while_its_request_is_sent_does_nothing(
    owner: HttpAdminClient,
) -> None:
    """The credential is judged again when the body is there."""
    client = await holder(owner, "admin")
    body = json.dumps({"name": "bar"}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(owner.url.rpartition(":")[2]))
    writer.write(
        b"POST /admin/v1/tenants HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
        b"Expect: 100-continue\r\n"
        b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n"
        % (client._key.encode(), len(body))
    )
    assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")  # it waits for the body
    await owner.call("keys.revoke", id=id_of(client))
    writer.write(body)
    answer = await reader.read()
    writer.close()
    assert b"key_revoked" in answer
    assert await refusal(owner, "tenants.show", name="bar") == (404, "tenant_not_found")


@pytest.mark.parametrize(
    ("rights", "found"),
    [
        ({"expires_at": 1.0}, (401, "key_expired")),
        ({"tenant": "nobody"}, (401, "key_revoked")),
        ({"networks": ("10.0.0.0/8",)}, (403, "address_not_allowed")),
        ({"networks": ("127.0.0.0/8",)}, (200, "")),
    ],
)
async def test_a_key_works_for_its_time_tenant_and_networks(
    owner: HttpAdminClient, nats_url: str, rights: dict[str, Any], found: tuple[int, str]
) -> None:
    """The admin API judges a key as a gateway does."""
    async with operator(nats_url) as op:
        client = HttpAdminClient(owner.url, (await op.create(scopes=("admin",), **rights))[0])
    await eventually(lambda: has_heard_of(owner, client))
    assert await refusal(client, "models.list") == found


async def has_heard_of(owner: HttpAdminClient, client: HttpAdminClient) -> bool:
    return id_of(client) in {key["id"] for key in (await owner.call("keys.list"))["data"]}


async def test_a_disabled_key_is_refused_until_it_is_enabled(
    owner: HttpAdminClient, nats_url: str
) -> None:
    """For now, and not for good."""
    client = await holder(owner, "operator")
    async with operator(nats_url) as op:
        await op.keys.set_disabled(id_of(client), is_disabled=True)
        await eventually(lambda: is_refused(client, "key_revoked"))
        await op.keys.set_disabled(id_of(client), is_disabled=False)
        await eventually(lambda: is_refused(client, ""))


async def test_guesses_at_a_keys_secret_are_slowed(owner: HttpAdminClient) -> None:
    """Its id is no secret; its holder, who was there before, is not slowed."""
    client = await holder(owner, "operator")
    assert await refusal(client, "models.list") == (200, "")

    async def guess() -> str:
        text = str(KeyText(id_of(client), KeyText.mint().secret))
        return (await refusal(HttpAdminClient(owner.url, text), "models.list"))[1]

    async def is_slowed() -> bool:
        return await guess() == "too_many_wrong_keys"

    assert await guess() == "invalid_api_key"
    await eventually(is_slowed)
    assert await refusal(client, "models.list") == (200, "")


async def test_without_a_pepper_managed_keys_are_refused(
    owner: HttpAdminClient, nats_url: str
) -> None:
    """With the reason."""
    client = await holder(owner, "admin")
    async with running_admin(nats_url) as other:
        with pytest.raises(AdminRefused, match="no pepper"):
            await HttpAdminClient(other.url, client._key).call("models.list")


async def test_a_managed_key_opens_a_service_without_a_key_of_its_own(
    nats_url: str, tmp_path: Path
) -> None:
    """Each administrator has a key of their own; nobody needs a shared one."""
    pepper = pepper_file(tmp_path)
    async with (
        running_admin(
            nats_url, admin_key=None, tenants=tenants(), key_pepper_file=pepper
        ) as keyless,
        connect(nats_url, "test") as broker,
    ):
        made = await NatsAdminClient(broker).call("keys.create", tenant="acme", scopes=["admin"])
        assert (await HttpAdminClient(keyless.url, made["key"]).call("models.list"))["data"] == []
        with pytest.raises(AdminRefused, match="no key of its own"):
            await keyless.call("models.list")

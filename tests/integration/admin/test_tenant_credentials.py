"""Admin services make tenants' accounts at the broker and cut them, while everything runs."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NoStreamResponseError
from structlog.testing import capture_logs

import admin.service
from admin import account_updates
from admin.settings import AdminSettings
from millstream.admin.admin_client import AdminRefused, HttpAdminClient
from streams.accounts.access import UserClass
from streams.accounts.cell_directory import CellDirectory, InvalidCellDirectory
from streams.accounts.credentials_file import UserCredentials, parse_credentials
from streams.accounts.key_rotation import KeyRotation
from streams.broker.account_claims import push_claims
from streams.broker.cluster_clock import ClusterClock
from tests.support.accounts_cell import AccountClient, AccountsCell
from tests.support.admins import ADMIN_KEY, answers
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.services import running

SUBMIT = "infer.submit.acme.mock.batch"


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[AccountsCell]:
    """One server, without streams: the admin service makes them."""
    made = AccountsCell(tmp_path, 1)
    try:
        made.start()
        yield made
    finally:
        made.close()


@asynccontextmanager
async def admin_of(
    cell: AccountsCell, name: str = "admin", **settings: Any
) -> AsyncIterator[HttpAdminClient]:
    """An admin service that holds the cell's keys, and a client."""
    port = free_port()
    creds = cell.directory.add_user(name, UserClass.ADMIN)
    cell.directory.add_user("system", UserClass.SYSTEM)
    told = {
        "nats": ",".join(node.url for node in cell.nodes),
        "nats_creds": creds,
        "id": name,
        "admin_key": ADMIN_KEY,
        "admin_port": port,
        "broker_keys": cell.directory.path,
        **settings,
    }
    async with running(admin.service, AdminSettings.model_validate(told)):
        client = HttpAdminClient(f"http://127.0.0.1:{port}", ADMIN_KEY)
        await eventually(lambda: answers(client))
        yield client


async def issue(client: HttpAdminClient, tenant: str = "acme", **arguments: Any) -> UserCredentials:
    """New credentials of a tenant, once the admin service has its connections."""
    found: list[Mapping[str, Any]] = []

    async def try_once() -> bool:
        try:
            found.append(await client.call("credentials.issue", name=tenant, **arguments))
        except AdminRefused as refusal:
            if refusal.code not in ("accounts_not_told", "broker_unavailable"):
                raise
        return bool(found)

    await eventually(try_once)
    return parse_credentials(found[0]["credentials"], "the answer", 0)


async def add_acme(client: HttpAdminClient) -> UserCredentials:
    await client.call("tenants.add", name="acme", publishes=True)
    return await issue(client)


async def stores(client: AccountClient) -> bool:
    """Whether a submission is stored, once there is a stream for it."""
    try:
        return (await client.jetstream().publish(SUBMIT, b"{}")).stream == "INGRESS_acme"
    except NoStreamResponseError:
        return False


async def test_a_tenant_submits_with_what_the_admin_service_has_issued(cell: AccountsCell) -> None:
    """Shown once, and good at once; a second user has the same account."""
    with capture_logs() as events:
        async with admin_of(cell) as client:
            first = await add_acme(client)
            async with cell.connected(first) as producer:
                await eventually(lambda: stores(producer))
            second = await issue(client)
            assert second.account == first.account
            assert await cell.is_let_in(first)
            (listed,) = (await client.call("accounts.list"))["data"]
    assert (listed["name"], listed["account"]) == ("acme", first.account)
    said = json.dumps([listed, events], default=str)
    assert not [secret for secret in (first.key.seed, first.token) if secret in said]


async def test_withdrawn_credentials_are_cut_off_at_once(cell: AccountsCell) -> None:
    """By hand, with the tenant, and when it publishes no more; then new ones are good again."""
    async with admin_of(cell) as client:
        credentials = await add_acme(client)
        for operation, arguments in (
            ("credentials.withdraw", {}),
            ("tenants.change", {"publishes": False}),
            ("tenants.remove", {}),
        ):
            async with cell.connected(credentials) as producer:
                await client.call(operation, name="acme", **arguments)
                await producer.was_closed.wait()
            assert not await cell.is_let_in(credentials)
            if operation == "tenants.remove":
                await client.call("tenants.add", name="acme", publishes=True)
            elif arguments:
                await client.call("tenants.change", name="acme", publishes=True)
            old, credentials = credentials, await issue(client)
            assert credentials.account == old.account
            assert not await cell.is_let_in(old)


async def test_a_tenant_that_the_configuration_drops_is_cut_off(cell: AccountsCell) -> None:
    """Nobody calls an operation then: the service that leads sees it."""
    async with admin_of(cell, tenants={"acme": {"publishes": True}}) as client:
        credentials = await issue(client)
    async with cell.connected(credentials) as producer, admin_of(cell, replace_tenants=True):
        await producer.was_closed.wait()


async def test_old_credentials_end_after_the_overlap(cell: AccountsCell) -> None:
    """Until then both are good."""
    async with admin_of(cell) as client:
        old = await add_acme(client)
        async with cell.connected(old) as producer:
            new = await issue(client, overlap_seconds=3600)
            newest = await issue(client, overlap_seconds=3600)
            assert await cell.is_let_in(old)
            assert len((await client.call("accounts.list"))["data"][0]["endings"]) == 2
            last = await issue(client, overlap_seconds=1)
            await producer.was_closed.wait()
        for ended in (old, new, newest):
            assert not await cell.is_let_in(ended)
        assert await cell.is_let_in(last)
        only = await issue(client, overlap_seconds=0)
        assert not await cell.is_let_in(last)
        assert await cell.is_let_in(only)


async def test_of_two_admin_services_both_make_the_same_account(cell: AccountsCell) -> None:
    """At the same moment, too: of two writers, the second one finds the account of the first."""
    async with admin_of(cell, "a1") as one, admin_of(cell, "a2") as two:
        await one.call("tenants.add", name="acme", publishes=True)
        await eventually(lambda: knows(two, "acme"))
        issued = await asyncio.gather(*(issue(each) for each in (one, two) * 4))
        assert len({each.account for each in issued}) == 1
        assert len({each.issued_at for each in issued}) == len(issued)
        for each in issued:
            assert await cell.is_let_in(each)
        await two.call("credentials.withdraw", name="acme")
        for each in issued:
            assert not await cell.is_let_in(each)


async def knows(client: HttpAdminClient, tenant: str) -> bool:
    found = (await client.call("tenants.list"))["data"]
    return tenant in [each["name"] for each in found]


async def test_a_server_that_lost_its_disk_is_told_again(cell: AccountsCell) -> None:
    """It is the only one, so nobody else could tell it."""
    with capture_logs() as events:
        async with admin_of(cell) as client:
            credentials = await add_acme(client)
            cell.nodes[0].kill()
            cell.lose_accounts(0)
            cell.nodes[0].start()
            await eventually(lambda: cell.is_let_in(credentials))
    joined = [each["joined"] for each in events if each["event"] == "accounts_told"]
    assert ["n0"] in joined


async def test_older_claims_do_not_stay(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers take them, as from an admin service that stood still meanwhile."""
    monkeypatch.setattr(account_updates, "RETELL_SECONDS", 0.0)
    async with admin_of(cell) as client:
        withdrawn = await add_acme(client)
        (older,) = await stored_claims(cell, withdrawn.account)
        await client.call("credentials.withdraw", name="acme")
        async with cell.client(UserClass.SYSTEM, "other") as system:
            await push_claims(system, older)
        await eventually(lambda: is_out(cell, withdrawn))


async def stored_claims(cell: AccountsCell, account: str) -> list[str]:
    """Claims of an account as the server has them."""
    return [file.read_text() for file in cell.resolver_directory(0).rglob(f"{account}.jwt")]


async def is_out(cell: AccountsCell, credentials: UserCredentials) -> bool:
    return not await cell.is_let_in(credentials)


async def test_tenants_stay_in_while_signing_keys_are_rotated(cell: AccountsCell) -> None:
    """The service that leads signs their accounts anew; those with old credentials go last."""
    keys = KeyRotation.open(cell.directory.path)
    async with admin_of(cell) as client:
        old = await add_acme(client)
        async with cell.connected(old) as producer:
            await eventually(lambda: stores(producer))
            before = await issued_at(client)
            async with cell.client(UserClass.SYSTEM, "system") as system:
                keys.begin_accounts()
                await tell(system, keys)
            keys.renew_users()
            await eventually(lambda: is_newer(client, before))
            assert await stores(producer)
            new = await issue(client)
            async with cell.client(UserClass.SYSTEM, "system") as system:
                keys.finish_accounts()
                await tell(system, keys)
            await producer.was_closed.wait()
        async with cell.connected(new) as producer:
            await eventually(lambda: stores(producer))
        assert not await cell.is_let_in(old)


async def tell(system: AccountClient, keys: KeyRotation) -> None:
    for token in keys.account_tokens():
        await push_claims(system, token)


async def issued_at(client: HttpAdminClient) -> int:
    (listed,) = (await client.call("accounts.list"))["data"]
    return int(listed["issued_at"])


async def is_newer(client: HttpAdminClient, before: int) -> bool:
    return await issued_at(client) > before


async def test_a_clock_that_is_an_hour_off_lets_nobody_stay(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of an account rise, wherever they come from, and order its claims and credentials."""
    async with admin_of(cell) as client:
        credentials = await add_acme(client)
        with monkeypatch.context() as patched:
            patched.setattr(ClusterClock, "now", lambda self: time.time() + 3600)
            ahead = await issue(client)
            assert ahead.issued_at > time.time() + 3000
        async with cell.connected(ahead) as producer:
            await client.call("credentials.withdraw", name="acme")
            await producer.was_closed.wait()
        assert not await cell.is_let_in(credentials)
        again = await issue(client)
        assert again.issued_at > ahead.issued_at
        assert await cell.is_let_in(again)


async def test_expired_credentials_are_refused(cell: AccountsCell) -> None:
    """The server says no more than that; the file itself tells when it ended."""
    async with admin_of(cell) as client:
        await client.call("tenants.add", name="acme", publishes=True)
        credentials = await issue(client, expires_seconds=1)
        assert credentials.expires_at is not None
        async with cell.connected(await issue(client, expires_seconds=2)) as producer:
            await producer.was_closed.wait()
        assert not await cell.is_let_in(credentials)


@pytest.mark.parametrize(
    ("operation", "arguments", "code", "message"),
    [
        ("credentials.issue", {"name": "nobody"}, "tenant_not_found", "no tenant 'nobody'"),
        ("credentials.issue", {"name": "quiet"}, "tenant_not_publishing", "--publishes"),
        ("credentials.issue", {"name": "acme", "expires_seconds": 0}, "invalid_request", "greater"),
        ("credentials.withdraw", {"name": "acme"}, "account_not_found", "--producer DIR"),
    ],
)
async def test_what_cannot_be_done_is_told(
    cell: AccountsCell, operation: str, arguments: dict[str, Any], code: str, message: str
) -> None:
    """Each with its remedy."""
    tenants = {"acme": {"publishes": True}, "quiet": {}}
    async with admin_of(cell, tenants=tenants) as client:
        with pytest.raises(AdminRefused, match=message) as refusal:
            await client.call(operation, **arguments)
        assert refusal.value.code == code


async def test_without_keys_no_account_is_made(cell: AccountsCell) -> None:
    """The refusal says which setting gives them; one that has them is not held up by the other."""
    async with admin_of(cell, broker_keys=None) as client:
        await client.call("tenants.add", name="acme", publishes=True)
        with pytest.raises(AdminRefused, match="--broker-keys") as refusal:
            await client.call("credentials.issue", name="acme")
        assert refusal.value.code == "no_broker_keys"


async def test_keys_that_lack_a_file_are_told_at_the_start(cell: AccountsCell) -> None:
    """Not when the first tenant comes."""
    (cell.directory.path / "keys/signing/WORK.seed").unlink()
    settings = AdminSettings(nats=cell.nodes[0].url, broker_keys=cell.directory.path)
    with pytest.raises(InvalidCellDirectory, match="lacks keys/signing/WORK.seed"):
        await admin.service.run(settings, asyncio.Event())


async def test_keys_of_another_cell_are_told(cell: AccountsCell, tmp_path: Path) -> None:
    """Its system user is not let in, so no server is told anything."""
    other = CellDirectory.create(tmp_path / "other", shards=1)
    other.add_user("system", UserClass.SYSTEM)
    with capture_logs() as events:
        async with admin_of(cell, broker_keys=other.path) as client:
            await client.call("tenants.add", name="acme", publishes=True)
            with pytest.raises(AdminRefused, match="system account") as refusal:
                await client.call("credentials.issue", name="acme")
            assert refusal.value.code == "accounts_not_told"
            await eventually(lambda: "accounts_not_told" in [e["event"] for e in events])
    assert os.listdir(other.path / "users") == ["system.creds"]

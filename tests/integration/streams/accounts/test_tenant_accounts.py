"""A tenant's account is made and cut while everything runs, and reaches nothing but its own."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from gateway.replies.stored_records import StoredRecords
from streams import messages, topology
from streams.accounts.access import UserClass
from streams.accounts.credentials_file import UserCredentials, read_credentials
from streams.broker.account_claims import ClaimsRefused, push_claims
from streams.broker.broker_client import connect
from streams.connection_files import ConnectionFiles
from streams.headers import MESSAGE_ID
from tests.support.accounts_cell import AccountClient, AccountsCell, admin_api
from tests.support.eventually import eventually
from tests.support.tenant_directory import TenantDirectory

DONE = messages.done_record("stop", messages.openai_usage(1, 1), {})
SUBMIT = "infer.submit.acme.mock.batch"


async def add_tenant(cell: AccountsCell, tenant: str) -> UserCredentials:
    await push(cell, cell.directory.add_tenant(tenant))
    return cell.directory.tenant_credentials(tenant)


async def push(cell: AccountsCell, token: str, node: int = 0) -> frozenset[str]:
    async with cell.client(UserClass.SYSTEM, node=node) as system:
        return (await push_claims(system, token)).taken


@asynccontextmanager
async def producer(cell: AccountsCell, node: int = 0) -> AsyncIterator[AccountClient]:
    """A client of the new tenant acme, which has a stream for its submissions."""
    credentials = await add_tenant(cell, "acme")
    async with cell.client(UserClass.ADMIN, "declarer") as admin:
        await admin_api(admin, "INGRESS_acme").add_stream(topology.ingress_stream("acme"))
    async with cell.connected(credentials, node) as client:
        yield client


async def test_a_producer_submits_and_hears_its_replies_and_no_others(
    declared: AccountsCell,
) -> None:
    """As docs/producers.md says: stored when acknowledged, replies, stored records of its own."""
    heard: list[str] = []

    async def note(message: Msg) -> None:
        heard.append(message.subject)

    async with (
        producer(declared) as client,
        declared.client(UserClass.GATEWAY, "g1") as gateway,
        declared.client(UserClass.WORKER, "w1") as worker,
    ):
        await client.subscribe("infer.reply.acme.>", cb=note)
        await client.flush()
        stored = await client.jetstream().publish(SUBMIT, b"{}", headers={MESSAGE_ID: "1"})
        assert (stored.stream, stored.seq) == ("INGRESS_acme", 1)

        await gateway.jetstream().add_consumer("INGRESS_acme", topology.ingress_consumer("acme"))
        pull = "$JS.API.CONSUMER.MSG.NEXT.INGRESS_acme.gateways"
        submitted = await gateway.request(pull, b'{"batch": 1}', timeout=5, old_style=True)
        assert submitted.subject == SUBMIT
        await submitted.ack_sync()

        for tenant in ("evil", "acme"):
            await worker.ask(f"infer.token.0.{tenant}.route.r1", messages.pack(DONE))
        await eventually(lambda: heard == ["infer.reply.acme.route.r1"])
        file = declared.directory.add_user("g2", UserClass.GATEWAY)
        async with connect(declared.nodes[0].url, "g2", ConnectionFiles(creds=file)) as broker:
            await StoredRecords(broker, shards=1).open()
            answer = await client.request("infer.records.acme.route.r1", timeout=60)
        ((_, record),) = messages.unpack(answer.data)["records"]
        assert messages.unpack(record) == DONE
        others = {
            "infer.records.evil.route.r1",
            "$JS.API.DIRECT.GET.TOKENS_0.infer.token.0.acme.route.r1",
            "$JS.API.DIRECT.GET.TOKENS_0",
            "infer.submit.evil.mock.batch",
            "infer.cancel.evil.r1",
            "infer.request.acme.mock.batch",
            "$JS.API.STREAM.INFO.INGRESS_acme",
        }
        assert await client.refused_to_publish(others) == others
        wanted = {"infer.reply.evil.>", "infer.reply.>", "infer.submit.acme.>", "infer.heard.>"}
        assert await client.refused_to_hear(wanted) == wanted


async def test_a_producers_cancel_is_stored_as_a_signal(declared: AccountsCell) -> None:
    """It crosses into the store, whose stream tells every listener."""
    async with producer(declared) as client, declared.connected(declared.insider("WORK")) as inside:
        signals = StreamConfig(name="HEARD", subjects=["infer.cancel.*.*"])
        known = [each.config.name for each in await inside.jetstream().streams_info()]
        if "SIGNALS" not in known:
            await inside.jetstream().add_stream(signals)
        answer = await client.jetstream().publish("infer.cancel.acme.r1", b"")
        assert answer.stream in ("HEARD", "SIGNALS")


async def test_answers_reach_nobody_from_a_tenants_account(declared: AccountsCell) -> None:
    """Even a user who may do all that the tenant's account can."""
    arrived: list[str] = []

    async def note(message: Msg) -> None:
        arrived.append(message.subject)

    targets = ("infer.cancel.evil.r1", "$KV.idempotency.evil.k", "infer.request.evil.m.batch")
    file = declared.directory.add_user("g1", UserClass.GATEWAY)
    gateway = connect(declared.nodes[0].url, "g1", ConnectionFiles(creds=file))
    async with (
        producer(declared),
        declared.connected(declared.insider("WORK")) as inside,
        gateway as broker,
    ):
        await StoredRecords(broker, shards=1).open()
        for target in targets:
            await inside.subscribe(target, cb=note)
        await inside.flush()
        async with declared.connected(declared.insider("T_acme")) as thief:
            for target in targets:
                await thief.publish(SUBMIT, b"{}", reply=target)
                await thief.publish("infer.cancel.acme.r1", b"", reply=target)
                await thief.publish("infer.records.acme.route.r1", b"", reply=target)
            await thief.flush()
            await thief.request("infer.records.acme.route.r1", timeout=60)
            last = await thief.jetstream().publish(SUBMIT, b"{}")
            assert last.seq == len(targets) + 1
            for subject in ("infer.submit.evil.m.batch", "infer.reply.acme.r.1", *targets):
                with pytest.raises(nats.errors.NoRespondersError):
                    await thief.request(subject, b"{}", timeout=5)
        await inside.flush()
    assert arrived == []


async def test_a_tenant_is_cut_off_and_let_in_again_with_new_credentials(
    cell: AccountsCell,
) -> None:
    """Whoever has stolen the old ones stays out."""
    old = await add_tenant(cell, "acme")
    assert await add_tenant(cell, "acme") != old  # a second user of the same account
    async with cell.connected(old) as client:
        await push(cell, cell.directory.disable_tenant("acme"))
        await client.was_closed.wait()
    assert not await cell.is_let_in(old)
    assert not await cell.is_let_in(cell.directory.tenant_credentials("acme"))
    new = await add_tenant(cell, "acme")
    assert await cell.is_let_in(new)
    assert not await cell.is_let_in(old)


async def test_credentials_that_no_server_takes(cell: AccountsCell, tmp_path: Path) -> None:
    """Expired, of another cell, or of an account that no server knows yet."""
    await add_tenant(cell, "acme")
    expired = cell.directory.tenant_credentials("acme", expires_at=int(time.time()) - 3600)
    assert not await cell.is_let_in(expired)
    other = TenantDirectory.create(tmp_path / "other", shards=1)
    await push(cell, other.add_tenant("acme"))  # servers keep what they are told, and use only ours
    assert not await cell.is_let_in(other.tenant_credentials("acme"))
    with pytest.raises(ClaimsRefused, match="n0"):
        await push(cell, "no claims")
    cell.directory.add_tenant("untold")
    assert not await cell.is_let_in(cell.directory.tenant_credentials("untold"))


async def test_a_tenants_credentials_are_good_until_the_old_keys_are_dropped(
    declared: AccountsCell,
) -> None:
    """Its producers hear replies meanwhile, and are given new ones."""
    keys = declared.directory
    old = await add_tenant(declared, "acme")
    gateway_file = keys.add_user("g1", UserClass.GATEWAY)
    async with declared.connected(old) as client:
        heard = await client.subscribe("infer.reply.acme.>")
        await client.flush()
        async with declared.client(UserClass.SYSTEM) as system:
            keys.begin_accounts()
            for token in keys.account_tokens():
                await push_claims(system, token)
        keys.renew_users()
        new = keys.tenant_credentials("acme")
        async with declared.connected(read_credentials(gateway_file, 0)) as gateway:
            await gateway.ask("infer.token.0.acme.route.r1", b"accepted")
        assert (await heard.next_msg(5)).data == b"accepted"
        assert await declared.is_let_in(old)
        keys.finish_accounts()
        for token in keys.account_tokens():
            await push(declared, token)
        await client.was_closed.wait()
    assert not await declared.is_let_in(old)
    assert await declared.is_let_in(new)


async def test_every_server_takes_a_new_tenant(three: AccountsCell) -> None:
    """Its producers may connect to any of them at once, and submit to a replicated stream."""
    await three.declare()
    async with producer(three, node=2) as client:
        await eventually(lambda: _stores(client))
    assert await push(three, three.directory.add_tenant("beta")) == {"n0", "n1", "n2"}
    for node in range(3):
        assert await three.is_let_in(three.directory.tenant_credentials("beta"), node)


async def _stores(client: AccountClient) -> bool:
    return (await client.jetstream().publish(SUBMIT, b"{}")).seq > 0


async def test_a_server_that_was_down_learns_what_it_missed(three: AccountsCell) -> None:
    """A tenant that was made meanwhile is let in, and one that was cut off is not."""
    old = await add_tenant(three, "gone")
    three.nodes[2].kill()
    await eventually(lambda: three.has_servers(2))
    assert await push(three, three.directory.disable_tenant("gone")) == {"n0", "n1"}
    assert await push(three, three.directory.add_tenant("beta")) == {"n0", "n1"}
    three.nodes[2].start()
    await eventually(lambda: _is_in(three, three.directory.tenant_credentials("beta"), 2))
    await eventually(lambda: _is_out(three, old, 2))
    assert not await three.is_let_in(old, 0)


async def test_a_server_that_lost_its_accounts_gets_them_back(three: AccountsCell) -> None:
    """From the others; and from the cell's directory, where all have lost theirs."""
    credentials = await add_tenant(three, "acme")
    three.nodes[1].kill()
    three.lose_accounts(1)
    three.nodes[1].start()
    await eventually(lambda: _is_in(three, credentials, 1))
    for number, node in enumerate(three.nodes):
        node.kill()
        three.lose_accounts(number)
    for node in three.nodes:
        node.start()
    await eventually(lambda: three.has_servers(3))
    assert not await three.is_let_in(credentials)
    for token in three.directory.account_tokens():
        await push(three, token)
    for number in range(3):
        assert await three.is_let_in(credentials, number)


async def _is_in(cell: AccountsCell, credentials: UserCredentials, node: int) -> bool:
    return await cell.is_let_in(credentials, node)


async def _is_out(cell: AccountsCell, credentials: UserCredentials, node: int) -> bool:
    return not await cell.is_let_in(credentials, node)

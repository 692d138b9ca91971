"""JetStream writes its answers to any reply subject, with the server's rights: they reach nothing.

The attacker may do all that its account can, more than any process of ours.
"""

import asyncio
import json

import pytest
from nats.aio.msg import Msg

from streams import subjects, topology
from streams.accounts import access
from streams.accounts.access import UserClass, exports_of
from streams.accounts.rights import STORES, BrokerAccount, Pins
from streams.subjects import PoolKey, Priority
from tests.support.accounts_cell import AccountClient, AccountsCell, admin_api
from tests.support.eventually import eventually

TARGETS = (
    "$KV.tenants.victim",
    "$KV.registry.victim",
    "$KV.leases.victim",
    "$KV.idempotency.evil.victim",
    "infer.request.evil.victim.batch",
    "infer.submit.evil.victim.batch",
    "infer.work.victim.v.batch.any",
    "infer.token.0.evil.gw.victim",
    "infer.reply.evil.gw.victim",
    "infer.ledger.evil.victim",
    "infer.billed.evil.victim",
    "infer.cancel.evil.victim",
    "infer.heard.cancel.evil.victim",
    "infer.drain.victim",
    "infer.changed.tenants.victim",
    "infer.admin.victim",
    "infer.report.victim",
    "infer.alive.victim",
    "_INBOX.victim.x",
    "$JS.API.STREAM.DELETE.DEAD",
    "$JS.API.STREAM.PURGE.REQUESTS",
    "CONTROL.API.STREAM.DELETE.LEDGER",
    "WORK.API.STREAM.DELETE.DEAD",
    "$SYS.REQ.CLAIMS.UPDATE",
)
PROCESSES = (BrokerAccount.SERVICES, BrokerAccount.WORKERS, BrokerAccount.OPERATORS)
QUESTIONS = (b"", b'{"seq": 1}', b'{"last_by_subj": "infer.request.acme.m.batch"}')


class Witness:
    """What arrives on the victims' subjects, in any account."""

    def __init__(self) -> None:
        self.arrived: set[tuple[str, str]] = set()

    async def watch(self, client: AccountClient, account: str) -> None:
        async def note(message: Msg) -> None:
            if message.subject in TARGETS:
                self.arrived.add((account, message.subject))

        await client.subscribe(">", cb=note)
        await client.flush()


async def stream_states(cell: AccountsCell) -> dict[str, int]:
    """The last sequence of each stream that there is."""
    found = {}
    async with cell.client(UserClass.ADMIN, "auditor") as admin:
        for stream in ("DEAD", "LEDGER"):
            for info in await admin_api(admin, stream).streams_info():
                found[info.config.name or ""] = info.state.last_seq
    return found


def samples(account: BrokerAccount) -> list[str]:
    """A subject of each service that an account imports."""
    rights = [r for r in access.imports_of(account) if r.action == "publish"]
    patterns = (r.local or r.imported() for r in rights)
    return [p.replace("*.", "x.").replace("*", "x").replace(">", "x") for p in patterns]


@pytest.mark.parametrize("account", PROCESSES)
async def test_answers_of_jetstream_reach_no_subject_outside_the_askers_account(
    everywhere: AccountsCell, account: BrokerAccount
) -> None:
    """Each service that is imported, with each victim's subject as its reply subject."""
    witness = Witness()
    others = [each for each in BrokerAccount if each not in (account, BrokerAccount.SYSTEM)]
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        done = asyncio.Event()
        watching = [asyncio.Event() for _ in others]

        async def watch(other: BrokerAccount, ready: asyncio.Event) -> None:
            async with everywhere.connected(everywhere.insider(other), node=-1) as client:
                await witness.watch(client, other)
                ready.set()
                await done.wait()
                await client.flush()

        for other, ready in zip(others, watching, strict=True):
            tasks.create_task(watch(other, ready))
        for ready in watching:
            await ready.wait()
        before = await stream_states(everywhere)
        async with everywhere.connected(everywhere.insider(account)) as attacker:
            await attack(attacker, account)
        done.set()
    assert witness.arrived == set()
    after = await stream_states(everywhere)
    assert after.keys() == before.keys()
    for stream in ("KV_tenants", "KV_registry"):
        assert after[stream] == before[stream]


async def attack(attacker: AccountClient, account: BrokerAccount) -> None:
    """Every imported service, asked in ways that are answered, with every victim to answer to."""
    literal = ["$JS.API.STREAM.INFO.REQUESTS", "$JS.API.DIRECT.GET.TOKENS_0"]
    for subject in (*samples(account), *literal):
        for target in TARGETS:
            for question in QUESTIONS:
                await attacker.publish(subject, question, reply=target)
        await attacker.flush()
    assert await attacker.ask("$JS.API.INFO")  # what was sent before it was answered, too


async def test_nobody_publishes_into_an_account_what_it_does_not_offer(
    declared: AccountsCell,
) -> None:
    """Whatever an account exports needs an activation, and each names one importer and subject."""
    async with declared.connected(declared.insider(BrokerAccount.WORKERS)) as thief:
        for subject in (
            "infer.request.acme.mock.batch",
            "$KV.tenants.x",
            "$JS.API.STREAM.INFO.KV_tenants",
            "$JS.API.DIRECT.GET.REQUESTS",
            "$JS.API.STREAM.PURGE.TOKENS_0",
            "$JS.API.CONSUMER.CREATE.TOKENS_0",
            "infer.admin.models.add",
        ):
            assert await thief.ask(subject, b"{}") is None, subject


def test_stores_have_no_users_and_offer_nothing_without_an_activation() -> None:
    """Who holds one right inside a store can delete its streams."""
    assert not set(access.ACCOUNT_OF.values()) & set(STORES)
    exports = [e for account in BrokerAccount for e in exports_of(account)]
    assert all(each.claims()["token_req"] for each in exports)


async def test_inside_a_store_the_same_attack_deletes_a_stream(declared: AccountsCell) -> None:
    """Why nobody sits there, and that the attack of the other tests is one."""
    witness = Witness()
    async with (
        declared.connected(declared.insider(BrokerAccount.WORK)) as watcher,
        declared.connected(declared.insider(BrokerAccount.WORK)) as attacker,
    ):
        await witness.watch(watcher, "WORK")
        await eventually(lambda: _has_written_a_signal(attacker, witness))
        await eventually(lambda: _has_deleted(attacker, declared))


async def _has_written_a_signal(attacker: AccountClient, witness: Witness) -> bool:
    """Again and again, since JetStream of a young stream may not answer yet."""
    await _ask_for_nothing(attacker, "infer.heard.cancel.evil.victim")
    return bool(witness.arrived)


async def _has_deleted(attacker: AccountClient, cell: AccountsCell) -> bool:
    await _ask_for_nothing(attacker, "$JS.API.STREAM.DELETE.DEAD")
    return "DEAD" not in await stream_states(cell)


async def _ask_for_nothing(attacker: AccountClient, reply: str) -> None:
    """Ask a stream for a message that it has not, to be answered on a subject."""
    question = b'{"last_by_subj": "infer.dead.x.y"}'
    await attacker.publish("$JS.API.DIRECT.GET.DEAD", question, reply=reply)
    await attacker.flush()


async def test_a_consumer_delivers_nothing_into_other_streams(declared: AccountsCell) -> None:
    """A push consumer has stored messages sent to any subject that its maker names."""
    pool = PoolKey("mock", "v1", Priority.BATCH)
    config = topology.work_consumer(pool, 10)
    pins = Pins("w1", (("mock", "v1"),))
    before = await stream_states(declared)
    async with (
        declared.client(UserClass.DISPATCHER, "d1") as dispatcher,
        declared.client(UserClass.WORKER, "w1", pins) as worker,
    ):
        for target in TARGETS:
            config.deliver_subject = target
            body = json.dumps({"stream_name": "WORK", "config": config.as_dict()}).encode()
            subject = f"$JS.API.CONSUMER.CREATE.WORK.{config.name}.{subjects.work(pool)}"
            made = "error" not in await worker.ask(subject, body)
            for payload in (b"", b"{}"):
                await dispatcher.ask(subjects.work(pool), payload)
            if made:
                info = await dispatcher.ask(f"$JS.API.CONSUMER.INFO.WORK.{config.name}")
                assert info["delivered"]["consumer_seq"] == 0, target
                await dispatcher.ask(f"$JS.API.CONSUMER.DELETE.WORK.{config.name}")
    after = await stream_states(declared)
    assert after == {**before, "WORK": after["WORK"]}

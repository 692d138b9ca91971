"""Audit of streams and their configuration before and after an attack, by users in the stores.

Nobody has such users; the audit makes them with the stores' own keys.
"""

import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

from streams import topology
from streams.accounts.access import UserClass, store_of
from streams.accounts.cell_directory import tenant_account
from streams.accounts.rights import STORES, BrokerAccount
from tests.adversary.cell import MALLORY, TAILSPIN, RunningCell
from tests.adversary.promises import Promise
from tests.adversary.target_subjects import MADE_UP, MARK, subjects_of
from tests.support.accounts_cell import AccountClient

_PAGE_BYTES = 8_000_000
DECIDED = ("KV_registry", "KV_tenants", "KV_keys", "KV_prices")  # nobody changes these meanwhile
# Nothing is removed from these while a run lasts
_KEPT = (
    topology.LEDGER,
    topology.DEAD,
    topology.REPLAYS,
    topology.ATTEMPTS,
    topology.RESULTS,
    "TOKENS_0",
)
_NOT_READABLE = (topology.SIGNALS, topology.REQUESTS, topology.WORK)  # what arrives is witnessed
_ANSWER = re.compile(rb'\s*\{"(?:type":"io\.nats\.|stream":"|error":)|-NAK\Z')
_LEADERS = (
    "dispatcher_"  # each leader makes its own; a stall of this machine makes another one lead
)
_COMMON = ("_R_.", "_INBOX.", "$JS.EVENT.", "$JS.API.", "$JS.ACK.")


@dataclass(frozen=True)
class StreamFacts:
    """A stream's configuration, its consumers', and its state."""

    config: str
    consumers: Mapping[str, str]
    messages: int
    first_seq: int
    last_seq: int
    deleted: int


@dataclass
class Changes:
    """Changes by an attack, as sentences: beyond its promise, and within it by subject."""

    holes: list[str] = field(default_factory=list)
    by_job: dict[str, int] = field(default_factory=dict)

    def note(self, where: str, subject: str, promise: Promise) -> None:
        """A message of the adversary that has arrived somewhere."""
        if promise.covers(subject):
            kind = ".".join(subject.split(".")[:2])
            self.by_job[kind] = self.by_job.get(kind, 0) + 1
        else:
            self.holes.append(f"{where}: {subject}")


def is_adversarys(subject: str, headers: Mapping[str, str], data: bytes) -> bool:
    """Whether a message is from an adversary, or an answer of the broker that was led astray."""
    if MARK in subject or MARK.encode() in data or any(MARK in each for each in headers.values()):
        return True
    return bool(_ANSWER.match(data)) or "Status" in headers


class StoreAudit:
    """Users in both stores, and listeners in the other accounts, until it is closed."""

    def __init__(self, stores: Mapping[BrokerAccount, AccountClient]) -> None:
        self._stores = stores
        self._next_seq: dict[str, int] = {}
        self._arrived: list[tuple[str, Msg]] = []

    async def witness(self, account: str, client: AccountClient, names: Iterable[str]) -> None:
        """Note what an account hears on these subjects."""

        async def note(message: Msg) -> None:
            self._arrived.append((account, message))

        for each in names:
            await client.subscribe(each, cb=note)
        await client.flush()

    async def snapshot(self) -> dict[str, StreamFacts]:
        """All streams as they are now."""
        found = {}
        for store, client in self._stores.items():
            context = client.jetstream(timeout=10)
            for info in await context.streams_info():
                name = info.config.name or ""
                state = info.state
                found[f"{store}/{name}"] = StreamFacts(
                    _config_text(info.config.as_dict()),
                    {
                        each.name: _config_text(each.config.as_dict())
                        for each in await context.consumers_info(name)
                    },
                    state.messages,
                    state.first_seq,
                    state.last_seq,
                    state.num_deleted or 0,
                )
        return found

    async def changes(
        self, before: Mapping[str, StreamFacts], promise: Promise
    ) -> tuple[Changes, dict[str, StreamFacts]]:
        """Changes by an adversary since `before`, and all streams as they are now."""
        for client in self._stores.values():
            await client.flush()
        after, changes = await self.snapshot(), Changes()
        changes.holes += _compare(before, after)
        for name in sorted(after):
            await self._read_new(name.partition("/")[2], changes, promise)
        arrived, self._arrived = self._arrived, []
        for account, message in arrived:
            if account in STORES and message.subject.startswith(_COMMON):
                continue
            if _is_left_over(message.subject, promise):
                continue
            if account == promise.account:
                continue  # who sits there hears what others of the account may hear, and no more
            if is_adversarys(message.subject, message.headers or {}, message.data):
                changes.note(f"heard in {account}", message.subject, promise)
        return changes, after

    async def _read_new(self, stream: str, changes: Changes, promise: Promise) -> None:
        """Look at what was stored since the last time."""
        if stream in _NOT_READABLE or topology.tenant_of_ingress(stream):
            return
        client = self._stores[store_of(stream)]
        begin = self._next_seq.get(stream, 1)
        while found := await _read_page(client, stream, begin):
            for seq, subject, headers, data in found:
                begin = seq + 1
                is_new = not _is_left_over(subject, promise)
                if is_new and is_adversarys(subject, headers, data):
                    changes.note(f"stored in {stream}", subject, promise)
        self._next_seq[stream] = begin


def _is_left_over(subject: str, promise: Promise) -> bool:
    """Return whether the adversary has submitted this as a tenant, in another attack.

    It is delivered, refused and answered while later attacks run.
    """
    return promise.user_class is not UserClass.TENANT and MALLORY in subject.split(".")


def _config_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, default=str)


def _compare(before: Mapping[str, StreamFacts], after: Mapping[str, StreamFacts]) -> list[str]:
    holes = [f"{name} is gone" for name in before.keys() - after.keys()]
    holes += [f"{name} was made" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        was, now = before[name], after[name]
        stream = name.partition("/")[2]
        if was.config != now.config:
            holes.append(f"{name} is configured otherwise")
        if stream in _KEPT and (now.first_seq != was.first_seq or now.deleted):
            holes.append(f"records are gone from {name}")
        if stream in DECIDED and (was.last_seq, was.messages) != (now.last_seq, now.messages):
            holes.append(f"{name} was written")
        holes += [
            f"the consumer {each} of {name} changed"
            for each in was.consumers.keys() | now.consumers.keys()
            if was.consumers.get(each) != now.consumers.get(each) and not each.startswith(_LEADERS)
        ]
    return holes


async def _read_page(
    client: AccountClient, stream: str, begin: int
) -> list[tuple[int, str, dict[str, str], bytes]]:
    """Stored messages from a sequence on, some thousand at most."""
    inbox, found = client.new_inbox(), []
    answers = await client.subscribe(inbox)
    query = {"seq": begin, "batch": 1000, "max_bytes": _PAGE_BYTES}
    await client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(query).encode(), reply=inbox)
    while "Status" not in (headers := (message := await answers.next_msg(10)).headers or {}):
        own = {k: v for k, v in headers.items() if not k.startswith("Nats-")}
        found.append((int(headers["Nats-Sequence"]), headers["Nats-Subject"], own, message.data))
    await answers.unsubscribe()
    return found


@asynccontextmanager
async def store_audit(cell: RunningCell) -> AsyncIterator[StoreAudit]:
    """An audit of both stores that also hears what arrives on made-up subjects elsewhere.

    On subjects that are in use nobody listens: a listener more would change what the services do.
    """
    async with AsyncExitStack() as stack:
        clients = {
            account: await stack.enter_async_context(
                cell.broker.connected(cell.broker.insider(account), node=-1)
            )
            for account in (*BrokerAccount, tenant_account(TAILSPIN))
            if account is not BrokerAccount.SYSTEM
        }
        audit = StoreAudit({BrokerAccount(each): clients[each] for each in STORES})
        made_up = [each for each in subjects_of(MADE_UP) if MARK in each]
        for account, client in clients.items():
            await audit.witness(account, client, (">",) if account in STORES else made_up)
        yield audit

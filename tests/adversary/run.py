"""One run: a cell, victims that ask throughout, and one adversary after the other."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from streams.accounts.access import UserClass
from streams.accounts.claims import Permissions
from streams.accounts.credentials_file import UserCredentials, read_credentials
from streams.accounts.minting import NewUser
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.rights import BrokerAccount
from tests.adversary import connection_attacks, gateway_attacks
from tests.adversary.broker_attacks import ATTACKS, Attack, Attacker, answer_elsewhere
from tests.adversary.canaries import Received
from tests.adversary.cell import (
    MALLORY,
    MODEL,
    NORTHWIND,
    SECOND,
    TAILSPIN,
    RunningCell,
    running_cell,
)
from tests.adversary.promises import ONE_RIGHT, PROMISES, Adversary
from tests.adversary.report import Row, Verdict
from tests.adversary.store_audit import StoreAudit, StreamFacts, store_audit
from tests.adversary.target_subjects import Names
from tests.adversary.victims import Victims, running_victims
from tests.adversary.worker_attacks import WorkerAttacks

HttpAttack = Callable[[RunningCell, list[Names], Received], Awaitable[tuple[int, int]]]

_NETWORK: dict[tuple[Adversary, str], HttpAttack] = {
    (Adversary.TENANT_KEY, "ask over HTTP"): gateway_attacks.use_key,
    (Adversary.TENANT_KEY, "resume and cancel"): gateway_attacks.use_websocket,
    (Adversary.PAGE, "cross origins, rebind names"): gateway_attacks.visit_page,
}

_DOORS = (Adversary.NOBODY, Adversary.TENANT_KEY, Adversary.PAGE)


@dataclass
class Outcome:
    """Counts of an attack: tries, refusals, effects on others, and its reach within its promise."""

    tries: int
    refused: int
    effects: list[str] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)


Act = Callable[[Received], Awaitable[Outcome]]


@dataclass
class Run:
    """A cell under attack, and what has been found so far."""

    cell: RunningCell
    victims: Victims
    audit: StoreAudit
    on_row: Callable[[Row], None]
    rows: list[Row] = field(default_factory=list)
    _before: Mapping[str, StreamFacts] = field(default_factory=dict)

    async def measure(self, adversary: Adversary, attack: str, act: Act) -> None:
        """Run an attack, let the victims go on for a while, and note its effects."""
        if not self._before:
            self._before = await self.audit.snapshot()
        promise, received = PROMISES[adversary], Received(self.victims.canaries)
        wrong, begun = len(self.victims.wrong), time.monotonic()
        outcome = await act(received)
        await self.victims.settle()
        changes, self._before = await self.audit.changes(self._before, promise)
        found = await asyncio.to_thread(received.search)  # services run in this loop, too
        by_job = {kind: size for kind, size in found.items() if kind in promise.reads}
        row = Row(
            str(adversary),
            attack,
            outcome.tries,
            outcome.refused,
            {kind: size for kind, size in found.items() if kind not in promise.reads},
            outcome.effects + changes.holes,
            self.victims.wrong[wrong:] + self.cell.ended,
            by_job | changes.by_job | outcome.reached,
            round(time.monotonic() - begun, 1),
        )
        self.rows.append(row)
        self.on_row(row)

    async def attack(self, adversary: Adversary, attacks: Mapping[str, Attack]) -> None:
        """All attacks of a class; these ones over the broker, if it can speak to that."""
        if adversary in _DOORS:
            await self.attack_doors(adversary)
        elif adversary is Adversary.STORE_USER:  # the control, which harms
            control = {"have answers sent elsewhere": answer_elsewhere}
            await self.attack_broker(adversary, control)
        elif adversary is Adversary.WORKER:
            await self.attack_broker(adversary, {**attacks, **WorkerAttacks(self.cell).attacks})
        else:
            await self.attack_broker(adversary, attacks)

    async def attack_broker(self, adversary: Adversary, attacks: Mapping[str, Attack]) -> None:
        """All attacks over one connection with the class's credentials."""
        credentials = self._credentials(adversary)
        async with self.cell.broker.connected(credentials, node=-1) as client:
            attacker = Attacker(
                client,
                credentials.inbox_prefix,
                PROMISES[adversary],
                self.names,
                Received(self.victims.canaries),
            )
            await attacker.open()
            for name, attack in attacks.items():
                await self.measure(adversary, name, _over_broker(attacker, attack))

    async def attack_doors(self, adversary: Adversary) -> None:
        """The attacks of those who come by HTTP, or without credentials."""
        for (who, name), attack in _NETWORK.items():
            if who is adversary:
                await self.measure(adversary, name, partial(self._over_http, attack))
        if adversary is Adversary.NOBODY:
            await self.measure(adversary, "connect", self._connect)
            if len(self.cell.broker.nodes) > 1:
                await self.measure(adversary, "join the cluster", self._join_cluster)

    async def _over_http(self, attack: HttpAttack, received: Received) -> Outcome:
        return Outcome(*await attack(self.cell, self.names(), received))

    async def _connect(self, received: Received) -> Outcome:
        return Outcome(*await connection_attacks.connect(self.cell, received))

    async def _join_cluster(self, received: Received) -> Outcome:
        return Outcome(*await connection_attacks.join_cluster(self.cell, received))

    def names(self) -> list[Names]:
        """Names in requests that run, one of each kind."""
        kinds = ((NORTHWIND, MODEL, "w1"), (TAILSPIN, MODEL, "w1"), (NORTHWIND, SECOND, "w2"))
        return [
            Names(
                tenant,
                model,
                self.victims.request_of(tenant, model),
                "gw-g1",
                worker,
                f"pool_{model}_1_standard",
                "_INBOX.g1.x",
                batch=self.victims.batch.removeprefix("batch_"),
                file=self.victims.file.removeprefix("file-"),
                response=self.victims.response.removeprefix("resp_"),
                webhook=self.victims.webhook.removeprefix("we_"),
                gateway="g1",
            )
            for tenant, model, worker in kinds
        ]

    def _credentials(self, adversary: Adversary) -> UserCredentials:
        if adversary is Adversary.TENANT_USER:
            return self.cell.tenant_user(MALLORY)
        if adversary is Adversary.STORE_USER:
            return _user_in_store(self.cell)
        promise = PROMISES[adversary]
        assert promise.user_class
        assert promise.pins.id
        file = self.cell.creds(promise.user_class, promise.pins.id, promise.pins)
        return read_credentials(file, time.time())


def _over_broker(attacker: Attacker, attack: Attack) -> Act:
    async def act(received: Received) -> Outcome:
        await attacker.begin(received)
        await attack(attacker)
        return Outcome(attacker.tries, attacker.refused, attacker.effects, attacker.reached)

    return act


def _user_in_store(cell: RunningCell) -> UserCredentials:
    """A user with one right, in the account of a store: what no cell of ours has."""
    directory = cell.broker.directory
    seed = (directory.path / "keys/signing" / f"{BrokerAccount.WORK}.seed").read_text()
    state = directory.read().accounts[BrokerAccount.WORK]
    user = NewUser(UserClass.SYSTEM, "control", KeyPair.generate(KeyKind.USER))
    rights = Permissions((ONE_RIGHT,), ("_INBOX.control.>",), answers=False)
    signer = KeyPair.from_seed(seed)
    return user.sign(state.public, signer, time.time(), permissions=rights)


@asynccontextmanager
async def started_run(
    home: Path, nodes: int, on_row: Callable[[Row], None] = lambda row: None
) -> AsyncIterator[Run]:
    """A run whose victims ask until the block ends."""
    async with (
        running_cell(home, nodes) as cell,
        running_victims(cell) as victims,
        store_audit(cell) as audit,
    ):
        yield Run(cell, victims, audit, on_row)


async def judge_each(
    home: Path,
    nodes: int,
    chosen: Collection[Adversary],
    on_row: Callable[[Row], None],
    attacks: Mapping[str, Attack] = ATTACKS,
) -> AsyncIterator[Verdict]:
    """All attacks of the chosen classes, one class after the other, each on a cell of its own.

    `attacks` are those over the broker that every class makes.
    """
    for number, adversary in enumerate(each for each in Adversary if each in chosen):
        async with started_run(home / str(number), nodes, on_row) as run:
            await run.attack(adversary, attacks)
        yield Verdict(str(adversary), nodes, run.victims.ended, run.rows)

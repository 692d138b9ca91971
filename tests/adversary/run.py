"""One run: a cell, victims that ask throughout, and one adversary after the other."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from streams.accounts.access import UserClass
from streams.accounts.claims import Permissions
from streams.accounts.credentials_file import UserCredentials, read_credentials
from streams.accounts.minting import NewUser
from streams.accounts.nkeys import KeyKind, KeyPair
from streams.accounts.rights import BrokerAccount
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
from tests.adversary.report import Row
from tests.adversary.store_audit import StoreAudit, StreamFacts, store_audit
from tests.adversary.targets import Names
from tests.adversary.victims import Victims, running_victims

Act = Callable[[Received], Awaitable[tuple[int, int]]]  # returns tries and refusals


@dataclass
class Run:
    """A cell under attack, and what has been found so far."""

    cell: RunningCell
    victims: Victims
    audit: StoreAudit
    rows: list[Row] = field(default_factory=list)
    _before: Mapping[str, StreamFacts] = field(default_factory=dict)

    async def measure(self, adversary: Adversary, attack: str, act: Act) -> None:
        """Run an attack, let the victims go on for a while, and note its effects."""
        if not self._before:
            self._before = await self.audit.snapshot()
        promise, received = PROMISES[adversary], Received(self.victims.canaries)
        wrong = len(self.victims.wrong)
        tries, refused = await act(received)
        await self.victims.settle()
        changes, self._before = await self.audit.changes(self._before, promise)
        found = received.search()
        by_job = {kind: size for kind, size in found.items() if kind in promise.reads}
        row = Row(
            str(adversary),
            attack,
            tries,
            refused,
            {kind: size for kind, size in found.items() if kind not in promise.reads},
            changes.holes,
            self.victims.wrong[wrong:],
            by_job | changes.by_job,
        )
        self.rows.append(row)

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
            )
            for tenant, model, worker in kinds
        ]

    def _credentials(self, adversary: Adversary) -> UserCredentials:
        if adversary is Adversary.TENANT_USER:
            return self.cell.tenant_user(MALLORY)
        if adversary is Adversary.STORE_USER:
            return _user_in_store(self.cell)
        promise = PROMISES[adversary]
        assert promise.user_class and promise.pins.id
        file = self.cell.creds(promise.user_class, promise.pins.id, promise.pins)
        return read_credentials(file, time.time())


def _over_broker(attacker: Attacker, attack: Attack) -> Act:
    async def act(received: Received) -> tuple[int, int]:
        attacker.received, attacker.tries, attacker.refused = received, 0, 0
        await attack(attacker)
        return attacker.tries, attacker.refused

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


OVER_BROKER = (
    Adversary.TENANT_USER,
    Adversary.WORKER,
    Adversary.GATEWAY,
    Adversary.DISPATCHER,
    Adversary.OPERATOR,
)


@asynccontextmanager
async def started_run(home: Path, nodes: int) -> AsyncIterator[Run]:
    """A run whose victims ask until the block ends."""
    async with (
        running_cell(home, nodes) as cell,
        running_victims(cell) as victims,
        store_audit(cell) as audit,
    ):
        yield Run(cell, victims, audit)


async def run_all(home: Path, nodes: int, chosen: Collection[Adversary]) -> Run:
    """Every attack of the chosen classes; the control, which does harm, comes last."""
    async with started_run(home, nodes) as run:
        for adversary in OVER_BROKER:
            if adversary in chosen:
                await run.attack_broker(adversary, ATTACKS)
        if Adversary.STORE_USER in chosen:
            control = {"have answers sent elsewhere": answer_elsewhere}
            await run.attack_broker(Adversary.STORE_USER, control)
        return run

"""Reservations of a dead gateway come back, once, and never what was used."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api.submission import reservation_recovery
from api.submission.reservation_recovery import ReservationRecovery
from gateway.admission import submitter
from streams import messages, quota_windows, subjects, topology
from streams.broker.broker_client import Broker
from streams.headers import MESSAGE_ID
from streams.messages import LedgerRecord
from streams.records import pending_reservations, usage_counters
from streams.records.pending_reservations import PendingReservation
from streams.records.token_log import write_ledger_record
from streams.subjects import Lane, Priority
from streams.usage_accounts import TENANT_SCOPE, Account, Price
from tests.integration.api.usage_counters import COST, is_settled, used_today
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, cell, gateways, tenants
from tests.support.ports import free_port
from tests.support.service_process import service_process

QUOTAS = {"tokens_per_day": 1000, "tokens_per_month": 10_000, "spend_per_day": 5.0}
POINTS = [
    "infer.reservation. 1 before",
    "infer.reservation. 1 after",
    "infer.usage. 1 after",
    "infer.usage. 2 before",
    "infer.request. 1 before",
    "infer.request. 1 after",
]


@asynccontextmanager
async def doomed_gateway(nats_url: str, home: Path) -> AsyncIterator[RunningGateway]:
    """A gateway process that kills itself where `DOOM` says."""
    config = home / "millstream.toml"
    quotas = "\n".join(f"{name} = {limit}" for name, limit in QUOTAS.items())
    config.write_text(f"[tenants.acme]\nkeys = ['{KEY}']\n{quotas}\n")
    port = free_port()
    settings = {"port": port, "config": config}
    program = "tests.integration.api.doomed_gateway"
    with service_process("gateway", nats_url, home / "log", program=program, **settings):
        found = RunningGateway(port, asyncio.Event())
        await eventually(found.is_ready)
        yield found


async def die(gateway: RunningGateway) -> None:
    """Send a request that kills the gateway."""
    with pytest.raises((OSError, EOFError)):
        await gateway.complete(headers={"Idempotency-Key": "one"}, deadline_ms=1000)


@pytest.mark.parametrize("point", POINTS)
async def test_a_gateway_may_be_killed_anywhere(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Its client asks another one, with the same key, and is counted once."""
    monkeypatch.setenv("DOOM", point)
    monkeypatch.setattr(reservation_recovery, "CHECK_SECONDS", 0.1)
    async with (
        cell(nats_url, tenants=tenants(**QUOTAS)) as (living,),
        connect(nats_url, "test") as broker,
        doomed_gateway(nats_url, tmp_path) as doomed,
    ):
        await die(doomed)
        again = await living.complete(headers={"Idempotency-Key": "one"}, deadline_ms=1000)
        assert again.status in (200, 504)  # also on a machine that stands still for a second
        await eventually(lambda: is_settled(broker, 1))


async def test_what_nobody_asks_again_is_given_back(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was counted in full, and was never queued."""
    monkeypatch.setenv("DOOM", "infer.request. 1 before")
    monkeypatch.setattr(reservation_recovery, "CHECK_SECONDS", 0.1)
    async with (
        cell(nats_url, tenants=tenants(**QUOTAS)),
        connect(nats_url, "test") as broker,
        doomed_gateway(nats_url, tmp_path) as doomed,
    ):
        await die(doomed)
        await eventually(lambda: is_settled(broker, 0))


async def test_a_gateway_that_stood_still_for_too_long_queues_nothing(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have given its reservation back meanwhile."""
    monkeypatch.setattr(submitter, "EXPIRY_MARGIN_SECONDS", -1000.0)
    async with (
        cell(nats_url, tenants=tenants(**QUOTAS)) as (gateway,),
        connect(nats_url, "test") as broker,
    ):
        answer = await gateway.complete()
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert "stood still" in answer.error["message"]
        await eventually(lambda: is_settled(broker, 0))


class Left:
    """A reservation of a process that is gone, with a request that may be queued."""

    def __init__(self, broker: Broker, ledger_seq: int) -> None:
        self.broker, now = broker, time.time()
        day = quota_windows.utc_day(now)
        self.account = Account("acme", (TENANT_SCOPE,), (day,), COST, 0, Price())
        self.pending = PendingReservation(
            "r1", "r1.cause", self.account.pack(), int(now * 1000), now, ledger_seq
        )

    async def reserve(self) -> None:
        await pending_reservations.store(self.broker, "gone", [self.pending])
        await usage_counters.add_once(self.broker, self.account.reserved, "r1.cause", 5)

    async def end(self, accepted: int, used: int) -> None:
        record = LedgerRecord(
            "r1", "acme", "mock", "1", "stop", used, 0, 1, "w", accepted, 0,
            account=self.account.pack(),
        )  # fmt: skip
        await write_ledger_record(self.broker, record)


@pytest.fixture
async def left(nats_url: str) -> AsyncIterator[Left]:
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        ledger = await broker.js.stream_info(topology.LEDGER)
        found = Left(broker, ledger.state.last_seq)
        await found.reserve()
        yield found


async def recover(left: Left) -> None:
    """Look several times, as gateways do; further looks change nothing more."""
    recovery = ReservationRecovery(left.broker)
    for _ in range(5):
        await recovery.recover()


async def test_several_give_back_once(left: Left) -> None:
    """Every gateway finds it."""
    await asyncio.gather(*(recover(left) for _ in range(3)))
    assert await used_today(left.broker) == 0


async def test_what_is_queued_stays_counted(left: Left) -> None:
    """A request that ends late is still settled from its whole reservation."""
    lane = Lane("acme", "mock", Priority.STANDARD)
    stored = await left.broker.store(subjects.request(lane), b"", {MESSAGE_ID: "r1"})
    await recover(left)
    assert await used_today(left.broker) == COST
    await left.end(left.pending.reserved_ms, used=7)
    await left.broker.remove(topology.REQUESTS, stored.seq)
    await recover(left)
    assert await used_today(left.broker) == 7


async def test_a_record_of_another_reservation_settles_that_one(left: Left) -> None:
    """The client has asked another gateway, which had a reservation of its own."""
    await usage_counters.add_once(left.broker, left.account.reserved, "r1.other", 5)
    await left.end(left.pending.reserved_ms + 500, used=7)
    await recover(left)
    assert await used_today(left.broker) == 7


@pytest.mark.parametrize(
    "data", [b"\xc1", LedgerRecord("r1", "acme", "mock", "1", "stop", 1, 1, 1, "w", 0, 0).pack()]
)
async def test_a_forged_record_lowers_no_counter(left: Left, data: bytes) -> None:
    """The broker takes the true one for its repetition; and no gateway ends of it."""
    subject = subjects.ledger("acme", "stolen")
    await left.broker.store(subject, data, {MESSAGE_ID: "r1"})
    await recover(left)
    assert await used_today(left.broker) == COST


FIELDS = {
    "request_id": "r1",
    "cause": "c",
    "packed_account": Account("acme", (TENANT_SCOPE,), ("2026-11-21",), 1, 0, Price()).pack(),
    "reserved_ms": 1,
    "expires_at": 1.0,
    "ledger_seq": 0,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"expires_at": "soon"},
        {"expires_at": None},
        {"reserved_ms": float("inf")},
        {"ledger_seq": []},
        {"packed_account": "acme"},
        {"packed_account": "> tenant 2026-11-21 1 0 0 0"},
        {"cause": "c\r\nNats-Rollup: all"},
    ],
)
async def test_reservations_that_cannot_be_read_hold_nobody_up(
    left: Left, wrong: dict[str, object]
) -> None:
    """A stolen gateway may write anything there: no gateway ends, and others' are given back."""
    holder = subjects.reservations("forger")
    for forged in (b"adversary", b"\x01", messages.pack(7), messages.pack([{**FIELDS, **wrong}])):
        await left.broker.store(holder, forged)
        found = await pending_reservations.read_all(left.broker)
        assert found == [left.pending]
    await recover(left)
    assert await used_today(left.broker) == 0


async def test_a_record_that_is_exported_and_removed_settles_still(left: Left) -> None:
    """The count stays, since nobody can tell any more whether there was a record."""
    await left.end(left.pending.reserved_ms, used=7)
    await left.broker.js.purge_stream(topology.LEDGER)
    await recover(left)
    assert await used_today(left.broker) == 7


async def test_what_the_broker_may_have_forgotten_stays_counted(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second addition might count twice."""
    monkeypatch.setattr(reservation_recovery, "RECOVERABLE_SECONDS", 0.0)
    await recover(left)
    assert await used_today(left.broker) == COST

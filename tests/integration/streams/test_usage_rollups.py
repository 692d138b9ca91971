"""Usage is added up once, by whoever does it, and is the ledger's to the last unit."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from streams import messages, subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.messages import LedgerRecord
from streams.records import usage_rollups, usage_sums
from streams.records.token_log import write_ledger_record
from streams.records.usage_rollups import UsageRollups
from streams.records.usage_sums import UsageSums, add_up, list_days
from streams.topology import LOG_SECONDS, Scale
from streams.usage_accounts import Price, PriceEntry
from tests.support.accounts_server import connect

ACCEPTED = 1_793_600_000_000  # 2026-11-02
DAY, DAY_MS = "2026-11-02", 86_400_000
USD = PriceEntry(1, "USD", Price(7, 11, 3)).pack()


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as made:
        await declaration.declare(made, Scale(), 10)
        yield made


def record(number: int, **more: Any) -> LedgerRecord:
    names = ("a", "b", "")
    known = LedgerRecord(
        f"r{number}",
        "acme",
        f"model.{number % 2}",
        "1",
        "stop",
        prompt_tokens=100 + number,
        completion_tokens=number,
        attempts=1,
        worker="w",
        accepted=ACCEPTED + (number % 4) * DAY_MS,
        finished=ACCEPTED + (number % 4) * DAY_MS + 5,
        cached_tokens=number % 50,
        price=USD,
        key=names[number % 3],
    )
    return replace(known, **more)


async def write(broker: Broker, records: list[LedgerRecord]) -> None:
    await asyncio.gather(*(write_ledger_record(broker, each) for each in records))


async def sums(broker: Broker, by: str, tenant: str = "acme") -> list[dict[str, Any]]:
    rows = await UsageRollups(broker).read(tenant, list_days(DAY, "2026-11-05"))
    return add_up(rows, by)


def expected(records: list[LedgerRecord]) -> UsageSums:
    total = UsageSums()
    for each in records:
        total += UsageSums.of(each)
    return total


async def test_usage_is_the_ledgers_by_day_model_and_key(broker: Broker) -> None:
    """However it is added up, and though it is rolled up in pieces."""
    first, second = [record(n) for n in range(40)], [record(n) for n in range(40, 90)]
    other = record(99, tenant="other", attempts=0)
    rollups = UsageRollups(broker)
    for part in (first, second, [other]):
        await write(broker, part)
        await rollups.roll_up()
        await rollups.roll_up()  # there is nothing new
    total = expected(first + second)
    for by, names in (
        ("day", [f"2026-11-0{number}" for number in range(2, 6)]),
        ("model", ["model.0", "model.1"]),
        ("key", ["", "a", "b"]),
    ):
        found = await sums(broker, by)
        assert [each[by] for each in found] == names
        for field, wanted in vars(total).items():
            assert sum(each[field] for each in found) == wanted
    assert await sums(broker, "day", "other") == [
        {"day": "2026-11-05", "currency": "USD", **vars(UsageSums(requests=1)), "amount": "0"}
    ]


async def test_processes_that_roll_up_at_once_add_everything_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several gateways, and an exporter, while requests end."""
    monkeypatch.setattr(usage_rollups, "ROLLED_RECORDS", 7)
    records = [record(number) for number in range(200)]

    async def write_all() -> None:
        for start in range(0, len(records), 20):
            await write(broker, records[start : start + 20])

    async def roll_up_often() -> None:
        rollups = UsageRollups(broker)
        while not writing.done():
            await rollups.roll_up()
        await rollups.roll_up()

    writing = asyncio.create_task(write_all())
    await asyncio.gather(writing, *(roll_up_often() for _ in range(4)))
    (total,) = add_up(
        [row._replace(key="") for row in await UsageRollups(broker).read("acme", all_days())],
        "key",
    )
    assert {name: total[name] for name in vars(UsageSums())} == vars(expected(records))


def all_days() -> list[str]:
    return list_days(DAY, "2026-11-05")


async def test_a_roll_up_that_is_interrupted_is_taken_up_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sums are stored and the cursor is not: those are not added a second time."""
    records = [record(number) for number in range(24)]
    await write(broker, records)

    async def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(UsageRollups, "_advance", killed)
        with pytest.raises(KeyboardInterrupt):
            await UsageRollups(broker).roll_up()
    await UsageRollups(broker).roll_up()
    found = await sums(broker, "day")
    assert sum(each["charge"] for each in found) == expected(records).charge


async def test_a_second_record_of_a_request_is_not_added(broker: Broker) -> None:
    """It comes so late that the broker does not recognise it."""
    await write(broker, [record(0), record(4)])
    late = record(0).accepted + LOG_SECONDS * 1000
    again = record(0, finished=late, outcome="deadline_exceeded", completion_tokens=0)
    alone = record(8, finished=late)
    for each in (again, alone):
        await broker.store(subjects.ledger("acme", each.model), each.pack())
    assert (await broker.js.stream_info(topology.LEDGER)).state.messages == 4
    await UsageRollups(broker).roll_up()
    (found,) = await sums(broker, "day")
    assert found["requests"] == 3
    assert found["charge"] == expected([record(0), record(4), alone]).charge


async def test_what_cannot_be_read_stops_nothing(broker: Broker) -> None:
    for data in (b"\xc1", record(1, price="free").pack()):
        await broker.store(subjects.ledger("acme", "m"), data)
    await write(broker, [record(0)])
    await UsageRollups(broker).roll_up()
    (found,) = await sums(broker, "day")
    assert found["requests"] == 1


@pytest.mark.parametrize(
    ("start", "end"), [("2026-11-02", "2026-11-01"), ("2025-11-02", "2026-11-01"), ("x", "y")]
)
def test_days_are_checked(start: str, end: str) -> None:
    with pytest.raises(ValueError, match=r"are -?\d+ days|'x' is no day"):
        list_days(start, end)
    assert len(list_days("2026-02-27", "2026-03-01")) == 3
    assert usage_sums.recent_days(ACCEPTED / 1000) == ("2026-10-04", DAY)


async def test_what_cannot_be_read_ends_nobody(broker: Broker) -> None:
    """A roll-up may hold anything: it is added up anew from the ledger."""
    await write(broker, [record(number) for number in range(8)])
    rollups = UsageRollups(broker)
    through = await rollups.roll_up()
    told = await sums(broker, "model")
    for data in (b"adversary", b"[1]", b'{"through": "x", "rows": []}', b""):
        await broker.store(subjects.ROLLUP_CURSOR, data)
        assert await rollups.roll_up() == through
        assert await sums(broker, "model") == told
    sum_of_day = subjects.rollup("acme", DAY, "model.0")
    for data in (b"adversary", b'{"through": 1, "rows": [["a", "USD", "x"]]}'):
        await broker.store(sum_of_day, data)
        await broker.store(subjects.ROLLUP_CURSOR, b"")
        assert await rollups.roll_up() == through
        assert await sums(broker, "model") == told


async def test_a_forged_record_is_left_out(broker: Broker) -> None:
    """A record of the ledger may hold anything: sums are of the others."""
    forged: list[dict[str, Any]] = [
        {"accepted": 10**17},
        {"accepted": -(10**17)},
        {"accepted": "today", "finished": "tomorrow"},
        {"finished": 10**18, "compute_ns": 5},
        {"prompt_tokens": "many"},
        {"completion_tokens": None},
        {"tenant": "a.b"},
        {"model": 7},
        {"request_id": ["r"]},
        {"key": ["k"]},
        {"cached_tokens": 1.5},
        {"compute_ns": "x", "worker_price": "x"},
    ]
    await write(broker, [record(number) for number in range(8)])
    for number, fields in enumerate(forged):
        data = replace(record(1), **{"request_id": f"f{number}", **fields}).pack()
        await broker.store(subjects.ledger("acme", "model.1"), data)
    for other in (subjects.ledger("other", "model.1"), subjects.ledger("acme", "model.0")):
        await broker.store(other, replace(record(1), request_id="elsewhere").pack())
    worker_time = {"worker": "w", "model": "m", "version": "1", "since": 0, "elapsed_ns": 1}
    worker_time |= {"idle_ns": 0, "load_ns": 0, "lost_ns": 0}
    for until in (10**18, "now", None):
        data = messages.pack({**worker_time, "until": until})
        await broker.store(subjects.worker_time("m", "w"), data)
    await broker.store(
        subjects.worker_time("m", "w2"), messages.pack({**worker_time, "until": ACCEPTED})
    )
    rollups = UsageRollups(broker)
    assert await rollups.roll_up() >= 8 + len(forged)
    assert await rollups.read_costs([DAY]) == []
    requests = sum(row["requests"] for row in await sums(broker, "model"))
    assert requests == 8
    assert await sums(broker, "model", "other") == []

"""The ledger leaves as files: nothing is lost or twice, wherever the exporter is killed."""

import asyncio
import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millstream.ledger import commands, exporter, invoices, segments
from millstream.ledger.export_directory import DirectoryInUse, ExportDirectory
from millstream.ledger.exporter import ExportPlan, LedgerExporter, LedgerGap
from millstream.ledger.invoices import (
    Invoice,
    LedgerIncomplete,
    NothingToBill,
    SegmentsIncomplete,
    check_complete,
    make_invoice,
    read_directory,
    read_ledger,
)
from millstream.ledger.request_ids import INDEX_NAME, ExportedIds
from millstream.ledger.segments import OPEN_NAME, SegmentsDamaged, list_segments
from millstream.ledger.settings import ExportSettings, InvoiceSettings
from registry.tenant_records import Tenant
from registry.tenants import TenantNotFound, Tenants
from streams import messages, quota_windows, subjects, topology
from streams.accounts.access import UserClass
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.messages import LedgerRecord, RefusalCounts
from streams.records.token_log import write_ledger_record
from streams.records.usage_rollups import UsageRollups
from streams.topology import Scale
from streams.usage_accounts import Price, PriceEntry
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.services import always, command_settings, running

COUNT = 60
ACCEPTED = 1_793_600_000_000  # a moment of November 2026
MONTH = quota_windows.utc_day(ACCEPTED / 1000)[:7]
SMALL = ExportPlan(segment_bytes=4000, segment_seconds=3600)


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as made:
        await declaration.declare(made, Scale(), 10)
        yield made


def record(number: int, **more: Any) -> LedgerRecord:
    entry = PriceEntry(1 + number % 2, "USD", Price(7 + number, 11, 3))
    known = LedgerRecord(
        f"r{number}",
        "acme",
        "mock",
        "1",
        "stop",
        prompt_tokens=100 + number,
        completion_tokens=number,
        attempts=1,
        worker="w",
        accepted=ACCEPTED,
        finished=ACCEPTED + 5,
        cached_tokens=number % 50,
        price=entry.pack(),
    )
    return replace(known, **more)


async def write(broker: Broker, *numbers: int) -> None:
    for number in numbers:
        await write_ledger_record(broker, record(number))


async def write_all(broker: Broker) -> None:
    """Requests, and counts of refusals among them."""
    await write(broker, *range(COUNT // 2))
    counts = RefusalCounts("g", "acme", "mock", 1, 1, [("overloaded", "1", "batch", 2)])
    await broker.store(subjects.outcome("acme", "mock"), messages.pack(counts))
    await write(broker, *range(COUNT // 2, COUNT))


async def write_repeated(broker: Broker, number: int) -> None:
    """A record that the broker does not recognise, as after its window for duplicates."""
    again = record(number, outcome="deadline_exceeded", completion_tokens=0)
    await broker.store(subjects.ledger("acme", "mock"), again.pack())


async def export_once(broker: Broker, path: Path, plan: ExportPlan = SMALL) -> None:
    with closing(ExportDirectory(path)) as directory:
        await LedgerExporter(broker, directory, plan).export_all()


def exported_ids(path: Path) -> list[str]:
    found = list_segments(path)
    for segment in found:
        segment.verify()
    lines = [line for segment in found for line in segment.read()]
    return [line["request_id"] for line in lines if line["type"] == "request"]


def every_id(count: int = COUNT) -> list[str]:
    return [f"r{number}" for number in range(count)]


async def test_segments_have_every_message_once_and_in_order(
    broker: Broker, tmp_path: Path
) -> None:
    """Each says in its name which sequences it covers, without a gap."""
    await write_all(broker)
    await export_in_pages(broker, tmp_path)
    found = list_segments(tmp_path)
    assert len(found) > 3
    lines = [line for segment in found for line in segment.read()]
    assert [line["seq"] for line in lines] == list(range(lines[0]["seq"], found[-1].last + 1))
    assert found[0].first == 1
    assert [line["type"] for line in lines].count("refusals") == 1
    assert exported_ids(tmp_path) == every_id()
    await export_once(broker, tmp_path)  # there is nothing new
    assert list_segments(tmp_path) == found


def kill_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool
) -> None:
    """End the process at a call of a function, counted from 1: before it, or when it is done."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    async def killing_later(*args: Any, **named: Any) -> Any:
        is_last = next(calls) == call
        if is_last and not after:
            raise Killed
        await original(*args, **named)
        if is_last:
            raise Killed

    def killing(*args: Any, **named: Any) -> Any:
        is_last = next(calls) == call
        if is_last and not after:
            raise Killed
        result = original(*args, **named)
        if is_last:
            raise Killed
        return result

    is_async = inspect.iscoroutinefunction(original)
    monkeypatch.setattr(owner, name, killing_later if is_async else killing)


STEPS: list[tuple[Any, str, int]] = [
    (ExportDirectory, "add", 2),
    (segments.SegmentWriter, "add", 2),
    (os, "fsync", 3),
    (segments.SegmentWriter, "close", 2),
    (Path, "rename", 2),
    (segments, "sync_directory", 2),
    (ExportedIds, "add", 2),
    (ExportDirectory, "close_segment", 2),
    (UsageRollups, "roll_up", 1),
    (Broker, "purge", 1),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "call"), STEPS, ids=[f"{owner.__name__}.{name}" for owner, name, _ in STEPS]
)
async def test_an_exporter_that_is_killed_loses_nothing(
    broker: Broker, tmp_path: Path, owner: Any, name: str, call: int, after: bool
) -> None:
    """Wherever it is: the next one goes on behind the last closed segment."""
    await write_all(broker)
    removing = replace(SMALL, keep_seconds=0)
    with pytest.MonkeyPatch.context() as patched:
        kill_at(patched, owner, name, call, after=after)
        with pytest.raises(Killed):
            await export_in_pages(broker, tmp_path, removing)
    await export_in_pages(broker, tmp_path, removing)
    assert exported_ids(tmp_path) == every_id()
    assert not (tmp_path / OPEN_NAME).exists()
    await write(broker, COUNT)
    await export_in_pages(broker, tmp_path, removing)
    assert exported_ids(tmp_path) == every_id(COUNT + 1)
    info = await broker.js.stream_info(topology.LEDGER)
    assert info.state.messages == 0


async def export_in_pages(broker: Broker, path: Path, plan: ExportPlan = SMALL) -> None:
    """As `export_once`, with few messages a page."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exporter, "PAGE_MESSAGES", 7)
        await export_once(broker, path, plan)


async def test_a_killed_process_is_followed_by_another(
    broker: Broker, nats_url: str, tmp_path: Path
) -> None:
    """With SIGKILL, while the ledger is written: at the end each request is there once."""
    told = command_settings(nats_url, UserClass.LEDGER)
    broker_options = ("--nats", nats_url, "--nats-creds", str(told["nats_creds"]))
    options = (*broker_options, "--segment-bytes", "2000", "--remove-after", "0")
    command = ("-m", "millstream", "ledger", "export", str(tmp_path / "out"))

    written, is_done = itertools.count(), asyncio.Event()

    async def write_on() -> int:
        while not is_done.is_set():
            await write(broker, number := next(written))
        return number + 1

    writing = asyncio.create_task(write_on())
    for number in range(3):
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, *options, stdout=asyncio.subprocess.DEVNULL
        )
        await eventually(partial(has_segments, tmp_path / "out", 3 * number + 3))
        process.kill()
        await process.wait()
    is_done.set()
    count = await writing
    await export_once(broker, tmp_path / "out")
    assert exported_ids(tmp_path / "out") == every_id(count)


def has_segments(path: Path, count: int) -> bool:
    return path.exists() and len(list_segments(path)) >= count


async def test_a_request_is_exported_once_for_ever(broker: Broker, tmp_path: Path) -> None:
    """A second record is recognised in the same segment, in a later one, and by a new index."""
    await write(broker, 0, 1)
    await write_repeated(broker, 1)
    await export_once(broker, tmp_path)
    assert exported_ids(tmp_path) == every_id(2)
    await write_repeated(broker, 0)
    await export_once(broker, tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    await write_repeated(broker, 0)
    await write(broker, 2)
    await export_once(broker, tmp_path)
    assert exported_ids(tmp_path) == every_id(3)
    invoice = await make_invoice("acme", MONTH, read_ledger(broker, "acme"))
    assert (invoice.repeated, invoice.to_json()["requests"]) == (3, 3)


async def test_lost_records_are_told(broker: Broker, tmp_path: Path) -> None:
    """The export stops with a reason, and goes on when an operator says so."""
    await write(broker, 0)
    await export_once(broker, tmp_path)
    await write(broker, 1, 2)
    last = (await broker.js.stream_info(topology.LEDGER)).state.last_seq
    await broker.purge(topology.LEDGER, None, last)
    with pytest.raises(LedgerGap, match="--accept-gap"):
        await export_once(broker, tmp_path)
    await export_once(broker, tmp_path, replace(SMALL, accepts_gap=True))
    assert exported_ids(tmp_path) == ["r0", "r2"]
    with pytest.raises(LedgerIncomplete, match="--directory"):
        await check_complete(broker, MONTH)


async def test_damaged_directories_are_refused(broker: Broker, tmp_path: Path) -> None:
    """A changed or missing segment would be a wrong invoice."""
    await write_all(broker)
    await export_in_pages(broker, tmp_path)
    with closing(ExportDirectory(tmp_path)), pytest.raises(DirectoryInUse):
        ExportDirectory(tmp_path)
    found = list_segments(tmp_path)
    changed = found[1].path.read_bytes()
    found[1].path.write_bytes(changed.replace(b"acme", b"acne", 1))
    with pytest.raises(SegmentsDamaged, match="has the SHA-256"):
        await make_invoice("acme", MONTH, read_directory(tmp_path))
    found[1].path.unlink()
    with pytest.raises(SegmentsDamaged, match="a segment is missing"):
        ExportDirectory(tmp_path)
    found[1].path.write_bytes(changed)
    found[-1].path.unlink()
    with pytest.raises(SegmentsDamaged, match="put the missing ones back"):
        ExportDirectory(tmp_path)


async def test_an_invoice_of_nobody_is_none(
    broker: Broker, nats_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped tenant, month or directory is told; a tenant without requests owes nothing."""
    tenants = await Tenants.open(broker, declares=always)
    await tenants.upsert(Tenant(name="idle"))
    await tenants.close()
    now = time.time()
    await write_ledger_record(broker, record(0, accepted=int(now * 1000)))
    await export_once(broker, tmp_path)
    month = quota_windows.utc_day(now)[:7]
    told: Any = {**command_settings(nats_url), "month": month}

    async def bill(**chosen: Any) -> str:
        await invoices.run(InvoiceSettings(**told | chosen), asyncio.Event())
        return capsys.readouterr().out

    assert await bill(tenant="idle") == f"idle has no requests in {month}\n"
    assert "total:" in await bill(tenant="acme")
    assert "total:" in await bill(tenant="acme", directory=tmp_path)
    empty = await bill(tenant="acme", directory=tmp_path, month="2020-01")
    assert empty == "acme has no requests in 2020-01\n"
    with pytest.raises(TenantNotFound, match="no tenant 'acne'"):
        await bill(tenant="acne")
    with pytest.raises(NothingToBill, match=r"2999-01 has not begun: today is \d"):
        await bill(tenant="acme", month="2999-01")
    with pytest.raises(NothingToBill, match="has a request of a tenant 'acne': check the name"):
        await bill(tenant="acne", directory=tmp_path)


async def test_an_invoice_misses_segments_that_were_moved_away(
    broker: Broker, tmp_path: Path
) -> None:
    """Unless those that are left begin before the month does, and so have all of it."""
    await write_all(broker)
    await export_in_pages(broker, tmp_path)
    first, *rest = list_segments(tmp_path)
    told: Any = {"tenant": "acme", "directory": tmp_path}

    async def bill(month: str) -> None:
        await invoices.run(InvoiceSettings(month=month, **told), asyncio.Event())

    await bill(MONTH)
    moved = first.path.rename(tmp_path / "moved")
    with pytest.raises(
        SegmentsIncomplete, match=rf"up to sequence {first.last}, which were moved away"
    ):
        await bill(MONTH)
    await bill("2999-01")
    moved.rename(first.path)
    for segment in rest:
        segment.path.unlink()
    await bill(MONTH)  # the exporter may be behind: that is no gap


async def test_a_service_exports_while_it_runs(
    broker: Broker, nats_url: str, tmp_path: Path
) -> None:
    """Segments are closed by age, and what they hold leaves the ledger."""
    told = command_settings(nats_url, UserClass.LEDGER)
    settings = ExportSettings(**told, directory=tmp_path, segment_seconds=0.1, remove_after=0.1)

    class Service:
        run = staticmethod(commands.export)

    async with running(Service, settings):
        await write_all(broker)
        await eventually(lambda: len(exported_ids(tmp_path)) == COUNT)

        async def is_empty() -> bool:
            return not (await broker.js.stream_info(topology.LEDGER)).state.messages

        await eventually(is_empty)
        await write(broker, COUNT)
    assert len(exported_ids(tmp_path)) in (COUNT, COUNT + 1)
    await export_once(broker, tmp_path)
    assert exported_ids(tmp_path) == every_id(COUNT + 1)


async def test_an_invoice_is_exact_from_ledger_and_segments(broker: Broker, tmp_path: Path) -> None:
    """By model and price, to the last unit; other tenants and months are not in it."""
    await write_all(broker)
    others = [record(500, tenant="other"), record(501, accepted=ACCEPTED - 40 * 86_400_000)]
    for other in others:
        await write_ledger_record(broker, other)
    await write_ledger_record(broker, record(502, attempts=0, worker=""))
    await export_once(broker, tmp_path)
    await check_complete(broker, MONTH)
    invoices = [
        await make_invoice("acme", MONTH, read_ledger(broker, "acme")),
        await make_invoice("acme", MONTH, read_directory(tmp_path)),
    ]
    assert totals(invoices[0]) == totals(invoices[1])
    made = invoices[1].to_json()
    assert made["requests"] == COUNT + 1
    assert made["price_versions"] == [1, 2]
    billed = [record(number) for number in range(COUNT)]
    (total,) = made["totals"]
    assert total["amount"] == sum(each.charge for each in billed)
    assert sum(item["completion_tokens"] for item in made["items"]) == sum(range(COUNT))
    assert json.loads(json.dumps(made)) == made


def totals(invoice: Invoice) -> Any:
    shown = invoice.to_json()
    return shown["items"], shown["totals"]

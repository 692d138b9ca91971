"""Invoices: what a tenant owes for a month, to the last unit, from segments or from the ledger.

Every request counts once, by its id, and costs what its own price entry says. The memory needed
does not grow with the number of requests: their ids are compared in a temporary file.
"""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millstream.admin.console_output import make_console
from millstream.admin.fitted_table import Column, FittedTable
from millstream.ledger.lines import day_of, to_line
from millstream.ledger.segments import Line, Segment, list_segments
from millstream.ledger.settings import InvoiceSettings
from registry.tenants import check_tenant
from streams import subjects, topology
from streams.broker.broker_client import Broker, connect
from streams.broker.clock_sync import sample_once
from streams.errors import MillstreamError
from streams.headers import STORED_AT
from streams.quota_windows import utc_day
from streams.usage_accounts import format_amount

_COLUMNS = (
    Column("model", "name", least=12),
    Column("price", is_number=True),
    Column("requests", is_number=True),
    Column("prompt", is_number=True),
    Column("cached", is_number=True),
    Column("completion", is_number=True),
    Column("amount", is_number=True),
    Column("currency"),
)
_SHOWN = (
    "model",
    "price_version",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)


class NothingToBill(MillstreamError):
    """There is nothing of which an invoice could be made; the message says why."""


class LedgerIncomplete(MillstreamError):
    """The ledger does not have all records of a month any more; what was exported has them."""

    def __init__(self, month: str, oldest: str) -> None:
        begins = f"begins at {oldest}" if oldest else "is empty, and had records before"
        super().__init__(
            f"the ledger {begins}, so it does not have all of {month}: give --directory with the "
            "segments of `millstream ledger export`"
        )


class SegmentsIncomplete(MillstreamError):
    """The ledger had records before a directory's first segment; they may be of a month."""

    def __init__(self, month: str, first: Segment, begins: str) -> None:
        known = f", with records from {begins} on" if begins else ""
        super().__init__(
            f"the segments begin at sequence {first.first}{known}, so they may not have all of "
            f"{month}: put back those up to sequence {first.first - 1}, which were moved away from "
            f"{first.path.parent} (or the ledger lost these records before they were exported)"
        )
        self.month, self.first = month, first.first


@dataclass
class InvoiceItem:
    """A line for one model and entry of the price book; `amount` is in 10⁻¹² of the currency.

    `cached_tokens` are part of `prompt_tokens`.
    """

    model: str
    price_version: int
    currency: str
    price: dict[str, int]
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    amount: int = 0

    def add(self, line: Line) -> None:
        """Add a request."""
        billed = line["billed_tokens"]
        self.requests += 1
        self.prompt_tokens += billed["prompt"]
        self.cached_tokens += billed["cached"]
        self.completion_tokens += billed["completion"]
        self.amount += line["charge"]


@dataclass
class Invoice:
    """A tenant's requests of one month, added up by model and price.

    `repeated` counts records of requests that had one already, which are not added, `last_seq` is
    the last sequence of the ledger that was read, and `has_records` says whether the tenant has any
    record there, of whichever month.
    """

    tenant: str
    month: str
    items: dict[tuple[Any, ...], InvoiceItem] = field(default_factory=dict)
    repeated: int = 0
    last_seq: int = 0
    has_records: bool = False

    def add(self, line: Line) -> None:
        """Add a request of the tenant and month."""
        price = tuple(line["price"].values())  # of version 0 there may be several
        key = (line["model"], line["currency"], line["price_version"], price)
        if key not in self.items:
            facts = (line["model"], line["price_version"], line["currency"], line["price"])
            self.items[key] = InvoiceItem(*facts)
        self.items[key].add(line)

    def to_json(self) -> dict[str, Any]:
        """Return the invoice as JSON has it: amounts as integers of 10⁻¹² and as exact text."""
        items = [self.items[key] for key in sorted(self.items)]
        totals = dict.fromkeys(sorted({item.currency for item in items}), 0)
        for item in items:
            totals[item.currency] += item.amount
        return {
            "tenant": self.tenant,
            "month": self.month,
            "items": [asdict(item) | {"amount_text": format_amount(item.amount)} for item in items],
            "totals": [
                {"currency": currency, "amount": amount, "amount_text": format_amount(amount)}
                for currency, amount in totals.items()
            ],
            "requests": sum(item.requests for item in items),
            "price_versions": sorted({item.price_version for item in items}),
            "repeated_records": self.repeated,
            "last_seq": self.last_seq,
        }


async def run(settings: InvoiceSettings, stop: asyncio.Event) -> None:
    """Print what a tenant owes for a month.

    Requests belong to the month in which they were accepted. Raises `SegmentsDamaged` if a segment
    is missing or changed, `SegmentsIncomplete` if the first ones are missing and may have records
    of the month, `LedgerIncomplete` if the ledger is read and does not have all of the
    month any more, `TenantNotFound` or `NothingToBill` if no such tenant is known there or the
    month has not begun, and `BrokerUnavailable` if NATS does not answer.
    """
    if settings.directory:
        invoice = await _bill_segments(settings.directory, settings.tenant, settings.month)
    else:
        async with connect(settings.nats, "invoice", settings.nats_files) as broker:
            await sample_once(broker)
            invoice = await _bill_ledger(broker, settings.tenant, settings.month)
    shown = invoice.to_json()
    print(json.dumps(shown, indent=2)) if settings.as_json else _print_table(shown)


async def _bill_segments(directory: Path, tenant: str, month: str) -> Invoice:
    await asyncio.to_thread(check_segments_complete, list_segments(directory), month)
    invoice = await make_invoice(tenant, month, read_directory(directory))
    if not invoice.has_records:
        raise NothingToBill(
            f"no segment in {directory} has a request of a tenant {tenant!r}: check the name, and "
            "that all segments are there"
        )
    return invoice


async def _bill_ledger(broker: Broker, tenant: str, month: str) -> Invoice:
    if month > (today := utc_day(broker.clock.now())):
        raise NothingToBill(f"{month} has not begun: today is {today}")
    await check_complete(broker, month)
    invoice = await make_invoice(tenant, month, read_ledger(broker, tenant))
    if not invoice.has_records:
        await check_tenant(broker, tenant)
    return invoice


async def make_invoice(tenant: str, month: str, lines: AsyncIterator[Line]) -> Invoice:
    """Add up the requests of a tenant and month among `lines`; each counts once, by its id."""
    invoice = Invoice(tenant, month)
    with closing(sqlite3.connect("")) as seen:  # "": a temporary file, removed when it is closed
        seen.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
        async for line in lines:
            invoice.last_seq = max(invoice.last_seq, line["seq"])
            if line["type"] != "request" or line["tenant"] != tenant:
                continue
            invoice.has_records = True
            if not day_of(line).startswith(f"{month}-"):
                continue
            added = seen.execute("INSERT OR IGNORE INTO ids VALUES (?)", (line["request_id"],))
            if added.rowcount:
                invoice.add(line)
            else:
                invoice.repeated += 1
    return invoice


async def read_directory(directory: Path) -> AsyncIterator[Line]:
    """Yield all lines of a directory's segments, each segment checked before it is read."""
    for segment in list_segments(directory):
        await asyncio.to_thread(segment.verify)
        for line in segment.read():
            yield line


def check_segments_complete(segments: Sequence[Segment], month: str) -> None:
    """Raise `SegmentsIncomplete` if records of a month's requests may be in segments before these.

    The first segment of all begins at sequence 1. Later ones have all of a month if the first
    request that they have had ended before the month began.
    """
    if not segments or segments[0].first == 1:
        return
    requests = (
        line for segment in segments for line in segment.read() if line["type"] == "request"
    )
    oldest = next(requests, None)
    begins = utc_day(oldest["finished"] / 1000) if oldest else ""
    if begins[:7] >= month or not begins:
        raise SegmentsIncomplete(month, segments[0], begins)


async def check_complete(broker: Broker, month: str) -> None:
    """Raise `LedgerIncomplete` if the ledger may have lost records of a month's requests.

    It loses its oldest ones. So all of them are there if none was ever removed, or if the oldest
    one was stored before the month began.
    """
    info = await broker.call_api(lambda js: js.stream_info(topology.LEDGER))
    if info.state.first_seq <= (info.config.first_seq or 1):
        return
    page = await broker.read_filtered(topology.LEDGER, ">")
    oldest = page.messages[0].headers.get(STORED_AT, "") if page.messages else ""
    if oldest[:7] >= month or not oldest:
        raise LedgerIncomplete(month, oldest)


async def read_ledger(broker: Broker, tenant: str) -> AsyncIterator[Line]:
    """Yield the lines of a tenant's requests in the ledger, a page in memory at a time."""
    after = 0
    while True:
        subject = subjects.ledgers_of(tenant)
        page = await broker.read_filtered(topology.LEDGER, subject, after)
        for message in page.messages:
            yield to_line(message.seq, message.subject, message.data)
        if not page.messages or not page.remaining:
            return
        after = page.messages[-1].seq


def _print_table(invoice: dict[str, Any]) -> None:
    if not invoice["items"]:
        print(f"{invoice['tenant']} has no requests in {invoice['month']}")
        return
    cells = [
        (
            *(str(item[name]) for name in _SHOWN),
            item["amount_text"],
            item["currency"],
        )
        for item in invoice["items"]
    ]
    console = make_console()
    console.print(FittedTable(_COLUMNS, cells))
    for total in invoice["totals"]:
        console.print(f"total: {total['amount_text']} {total['currency']}")

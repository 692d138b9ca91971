"""Compares what is billed in every place: token logs, ledger, counters, usage, export, invoice.

10,000 requests go through a whole system while prices change, a worker is killed, records come a
second time, and the exporter is killed again and again. All differences must be 0.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench import reporting
from bench.live.cluster import MOCK, MODEL, Cluster, ClusterShape, run_cluster
from bench.reporting import Figure, Run
from millstream.ledger.invoices import make_invoice, read_directory, read_ledger
from millstream.ledger.segments import list_segments
from registry.price_book import PriceBook
from registry.tenant_records import Tenant
from registry.tenants import Tenants
from streams import messages, quota_windows, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage, connect
from streams.messages import LedgerRecord
from streams.records.token_log import decode_contents
from streams.records.usage_rollups import UsageRollups, add_up
from streams.usage_accounts import TENANT_SCOPE, Meter, Price
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway

REQUESTS, CONCURRENCY = 10_000, 64
REPEATED = 50  # records that are written a second time, which the broker does not recognise
PRICES = (Price(150_000, 600_000, 75_000), Price(200_000, 500_000), Price(7, 11, 3))
TENANT, SETTLE_SECONDS = "acme", 120.0
SHAPE = ClusterShape({TENANT: 1.0}, {"ttft_ms": 2, "itl_ms": 1}, workers=2, program=MOCK)
_DIFFERENCES = ("logs", "counters", "usage", "export", "invoice", "invoice_of_ledger")
FIGURES = (
    Figure("requests", "requests that ended with an answer"),
    Figure("seconds", "seconds for all of them"),
    Figure("attempts", "attempts beyond the first", "> 0"),
    Figure("kills", "kills of the exporter", "> 0"),
    Figure("repeated", "records that came a second time", "> 0"),
    Figure("records", "requests without a ledger record of their own", "0"),
    *(
        Figure(f"{name}_tokens", f"{name}: tokens beside the ledger's", "0")
        for name in _DIFFERENCES
    ),
    *(
        Figure(f"{name}_charge", f"{name}: 10⁻¹² of the currency beside the ledger's", "0")
        for name in _DIFFERENCES
        if name != "logs"
    ),
    Figure("bytes", "bytes of the ledger for each record"),
)


class Bill(NamedTuple):
    """Prompt and generated tokens together, and the charge in 10⁻¹² of the currency."""

    tokens: int
    charge: int


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, each on a fresh system, and publish; `seconds` has no effect."""
    found = [asyncio.run(_run()) for _ in range(runs)]
    setting = {"requests": REQUESTS, "concurrency": CONCURRENCY, "repeated_records": REPEATED}
    reporting.publish("ledger", setting, FIGURES, found)


async def _run() -> Run:
    async with run_cluster(SHAPE) as cluster, connect(cluster.nats, "bench") as broker:
        await _set_quotas(broker)
        with tempfile.TemporaryDirectory() as directory:
            return await _measured(cluster, broker, Path(directory))


async def _set_quotas(broker: Broker) -> None:
    """Quotas that are never reached: with them the broker counts tokens and spend of the day."""
    tenants = await Tenants.open(broker)
    quotas = {"tokens_per_day": 10**15, "spend_per_day": 1e9, "max_queued": 10_000}
    await tenants.upsert(Tenant.model_validate({"name": TENANT, **quotas}))
    await tenants.close()


async def _measured(cluster: Cluster, broker: Broker, directory: Path) -> Run:
    exporting = asyncio.create_task(_export_and_kill(cluster.nats, directory))
    began = time.monotonic()
    answered = await _send_all(cluster, broker)
    seconds = time.monotonic() - began
    await eventually(lambda: _has_records(broker, answered), SETTLE_SECONDS)
    await _repeat_records(broker)
    exporting.cancel()
    kills = await exporting
    await _export(cluster.nats, directory, "--once")
    return await _compare(broker, directory, answered) | {"seconds": seconds, "kills": kills}


async def _send_all(cluster: Cluster, broker: Broker) -> set[str]:
    """Send all requests, with two new prices and a dead worker; return the ids of those served."""
    prices = await PriceBook.open(broker)
    await prices.set_price(MODEL, "USD", PRICES[0])
    gateways = [
        RunningGateway(int(url.rpartition(":")[2]), asyncio.Event()) for url in cluster.urls
    ]
    victim = next(each for each in cluster.processes if each.name == "worker")
    events: dict[int, Callable[[], Awaitable[object]]] = {
        REQUESTS // 3: lambda: prices.set_price(MODEL, "USD", PRICES[1]),
        REQUESTS // 2: lambda: asyncio.to_thread(os.kill, victim.pid, signal.SIGKILL),
        2 * REQUESTS // 3: lambda: prices.set_price(MODEL, "USD", PRICES[2]),
    }
    numbers, answered = iter(range(REQUESTS)), set[str]()

    async def send_each() -> None:
        for number in numbers:
            if number in events:
                await events[number]()
            gateway = gateways[number % len(gateways)]
            words = "word " * (number % 40 + 1)
            answer = await gateway.complete(words, key=f"sk-{TENANT}", max_tokens=number % 30 + 1)
            if answer.status == 200:
                answered.add(answer.headers["x-request-id"])

    await asyncio.gather(*(send_each() for _ in range(CONCURRENCY)))
    await prices.close()
    return answered


async def _has_records(broker: Broker, answered: set[str]) -> bool:
    return answered <= {each.request_id for each in await _read_ledger(broker)}


async def _read_ledger(broker: Broker) -> list[LedgerRecord]:
    found = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
    return [LedgerRecord.unpack(message.data) for message in found]


async def _repeat_records(broker: Broker) -> None:
    """Store some records again, without the id by which the broker would recognise them."""
    for record in (await _read_ledger(broker))[:REPEATED]:
        late = {**vars(record), "finished": record.accepted + topology.LOG_SECONDS * 1000}
        again = LedgerRecord(**late)
        await broker.store(subjects.ledger(TENANT, record.model), again.pack())


async def _export_and_kill(nats: str, directory: Path) -> int:
    """Run exporters and kill each when it has closed a segment; how many were killed."""
    kills = 0
    with suppress(asyncio.CancelledError):
        while True:
            known = len(list_segments(directory))
            process = await _start_export(nats, directory)
            try:
                while len(list_segments(directory)) <= known:
                    await asyncio.sleep(0.05)
            finally:
                process.send_signal(signal.SIGKILL)
                await process.wait()
            kills += 1
    return kills


async def _export(nats: str, directory: Path, *words: str) -> None:
    process = await _start_export(nats, directory, *words)
    if await process.wait():
        raise RuntimeError("the export failed; its log is on stdout")


async def _start_export(nats: str, directory: Path, *words: str) -> asyncio.subprocess.Process:
    command = ("-m", "millstream", "ledger", "export", str(directory), "--nats", nats)
    options = ("--segment-bytes", "100000", "--segment-seconds", "1s", "--log-level", "error")
    return await asyncio.create_subprocess_exec(sys.executable, *command, *options, *words)


async def _compare(broker: Broker, directory: Path, answered: set[str]) -> dict[str, float]:
    stored = await _read_ledger(broker)
    records = {each.request_id: each for each in reversed(stored)}  # the first of each counts
    ledger = Bill(
        sum(sum(each.billed_tokens[:2]) for each in records.values()),
        sum(each.charge for each in records.values()),
    )
    month = quota_windows.utc_day(broker.clock.now())[:7]
    exported = await make_invoice(TENANT, month, read_directory(directory))
    direct = await make_invoice(TENANT, month, read_ledger(broker, TENANT))
    bills = {
        "logs": Bill(await _count_logged(broker, records), ledger.charge),
        "counters": await _read_counters(broker),
        "usage": await _read_usage(broker),
        "export": await _add_up_lines(directory),
        "invoice": _bill_of(exported.to_json()),
        "invoice_of_ledger": _bill_of(direct.to_json()),
    }
    info = await broker.js.stream_info(topology.LEDGER)
    found: dict[str, float] = {
        "requests": len(answered),
        "attempts": sum(each.attempts - 1 for each in records.values()),
        "repeated": len(stored) - len(records),
        "records": len(answered - records.keys()),
        "bytes": info.state.bytes / info.state.messages,
    }
    for name, bill in bills.items():
        found[f"{name}_tokens"] = bill.tokens - ledger.tokens
        if name != "logs":
            found[f"{name}_charge"] = bill.charge - ledger.charge
    return found


async def _count_logged(broker: Broker, records: dict[str, LedgerRecord]) -> int:
    """Prompt tokens of all requests, and the tokens that are stored in their logs."""
    logs: dict[str, list[StoredMessage]] = {}
    for message in await broker.read_subject(topology.token_stream_name(0), "infer.token.>"):
        logs.setdefault(message.subject, []).append(message)
    generated = sum(len(decode_contents(found).tokens) for found in logs.values())
    return generated + sum(each.billed_tokens[0] for each in records.values())


async def _read_counters(broker: Broker) -> Bill:
    totals = Counter[str]()
    for message in await broker.read_subject(topology.USAGE, "infer.usage.>"):
        _, _, _, scope, meter, _ = message.subject.split(".")
        if scope == TENANT_SCOPE:
            totals[meter] += int(json.loads(message.data)["val"])
    return Bill(totals[Meter.TOKENS], totals[Meter.SPEND])


async def _read_usage(broker: Broker) -> Bill:
    rollups = UsageRollups(broker)
    await rollups.roll_up()
    now = broker.clock.now()
    days = [quota_windows.utc_day(now - 86_400), quota_windows.utc_day(now)]
    rows = add_up(await rollups.read(TENANT, days), "day")
    tokens = sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows)
    return Bill(tokens, sum(row["charge"] for row in rows))


async def _add_up_lines(directory: Path) -> Bill:
    tokens = charge = 0
    async for line in read_directory(directory):
        if line["type"] == "request":
            tokens += line["billed_tokens"]["prompt"] + line["billed_tokens"]["completion"]
            charge += line["charge"]
    return Bill(tokens, charge)


def _bill_of(invoice: messages.Record) -> Bill:
    items = invoice["items"]
    tokens = sum(item["prompt_tokens"] + item["completion_tokens"] for item in items)
    return Bill(tokens, sum(total["amount"] for total in invoice["totals"]))

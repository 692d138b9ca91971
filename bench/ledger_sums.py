"""Compares what is billed in every place: token logs, ledger, counters, usage, export, invoice.

100,000 requests go through a whole system while prices change, each service is killed in turn,
clients repeat requests, records come a second time, and the exporter is killed again and again; or
nothing of that happens. All differences must be 0. `BENCH_REQUESTS` sends another number of
requests, and `BENCH_LONGEST_ANSWER` is what the longest answers have instead of 30 tokens.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from bench import reporting
from bench.live.cluster import MOCK, MODEL, Cluster, ClusterShape, run_cluster
from bench.reporting import Figure, Run
from millstream.ledger.invoices import make_invoice, read_directory, read_ledger
from millstream.ledger.segments import list_segments
from registry.price_book import PriceBook
from streams import messages, quota_windows, subjects, topology
from streams.broker.broker_client import Broker, connect
from streams.errors import BrokerUnavailable
from streams.messages import LedgerRecord
from streams.records.usage_rollups import UsageRollups
from streams.records.usage_sums import add_up
from streams.usage_accounts import TENANT_SCOPE, Meter, Price
from tests.support.eventually import eventually
from tests.support.gateways import HttpResponse, RunningGateway

T = TypeVar("T")
REQUESTS = int(os.environ.get("BENCH_REQUESTS", "100000"))
CONCURRENCY = 64
LONGEST_ANSWER = int(os.environ.get("BENCH_LONGEST_ANSWER", "30"))  # tokens
REPEATED = 50  # records that are written a second time, which the broker does not recognise
AGAIN_EVERY = 100  # requests; each such one is sent once more when it has been answered
TRIES, PAUSE_SECONDS = 60, 0.5  # of a client whose request is not answered
SEGMENT_BYTES = max(100_000, 10 * REQUESTS)
PRICES = (Price(150_000, 600_000, 75_000), Price(200_000, 500_000), Price(7, 11, 3))
KILLED = ("gateway-0", "worker-0", "dispatcher", "admin", "gateway-1", "worker-1")
TENANT, SETTLE_SECONDS = "acme", max(120.0, REQUESTS / 1000)
DEADLINE_SECONDS = 120.0  # after it, what a killed gateway had reserved is given back
READ_SECONDS = 20.0  # between two times that new records of the token logs are read
# They are never reached: with them the broker counts tokens and spend of the day
QUOTAS = {"tokens_per_day": 10**15, "spend_per_day": 1e9}
SHAPE = ClusterShape(
    {TENANT: 1.0},
    {"ttft_ms": 2, "itl_ms": 1},
    workers=2,
    program=MOCK,
    deadline_seconds=DEADLINE_SECONDS,
    max_queued=10_000,
    quotas=QUOTAS,
    ledger_bytes=max(2**28, 2000 * REQUESTS),  # no request is refused for want of room
)
SETTING = {
    "requests": REQUESTS,
    "concurrency": CONCURRENCY,
    "longest_answer": LONGEST_ANSWER,
}
_SIDES = ("logs", "counters", "usage", "export", "invoice", "invoice_of_ledger")


_DISTURBANCES = (
    Figure("settle_seconds", "seconds until what killed gateways had reserved was given back"),
    Figure("service_kills", "kills of gateways, workers, dispatcher and admin service", "> 0"),
    Figure("attempts", "attempts beyond the first", "> 0"),
    Figure("retries", "requests that clients sent again until they were answered", "> 0"),
    Figure("replays", "answered requests that were sent again", "> 0"),
    Figure("new_ids", "of these, answers with another request id", "0"),
    Figure("kills", "kills of the exporter", "> 0"),
    Figure("repeated", "records that came a second time", "> 0"),
)
_DIFFERENCES = (
    Figure("requests", "requests that were answered", str(REQUESTS)),
    Figure("seconds", "seconds for all of them"),
    Figure("records", "requests without a ledger record of their own", "0"),
    *(Figure(f"{name}_tokens", f"{name}: tokens beside the ledger's", "0") for name in _SIDES),
    *(
        Figure(f"{name}_charge", f"{name}: 10⁻¹² of the currency beside the ledger's", "0")
        for name in _SIDES
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
    found = [asyncio.run(_run(_measure_disturbed)) for _ in range(runs)]
    setting = {**SETTING, "repeated_records": REPEATED}
    reporting.publish("ledger", setting, (*_DIFFERENCES, *_DISTURBANCES), found)


def measure_undisturbed(runs: int, seconds: float) -> None:
    """Measure without kills, repetitions and changes of prices; `seconds` has no effect."""
    found = [asyncio.run(_run(_measure_undisturbed)) for _ in range(runs)]
    reporting.publish("ledger-undisturbed", SETTING, _DIFFERENCES, found)


async def _run(measure_system: Callable[[Cluster, Broker, Path], Awaitable[Run]]) -> Run:
    async with run_cluster(SHAPE) as cluster, connect(cluster.nats, "bench") as broker:
        with tempfile.TemporaryDirectory() as directory:
            return await measure_system(cluster, broker, Path(directory))


async def _measure_undisturbed(cluster: Cluster, broker: Broker, directory: Path) -> Run:
    logs, load = TokenLogs(broker), _Load(cluster, broker, is_disturbed=False)
    reading = asyncio.create_task(logs.run())
    began = time.monotonic()
    await load.send_all()
    seconds = time.monotonic() - began
    await eventually(lambda: _has_records(broker, load.answered), SETTLE_SECONDS)
    reading.cancel()
    await logs.read()
    await eventually(lambda: _is_settled(broker), SETTLE_SECONDS)
    await _export(cluster.nats, directory, "--once")
    found = await _patiently(lambda: _compare(broker, directory, load.answered, logs))
    return found | {"seconds": seconds}


async def _measure_disturbed(cluster: Cluster, broker: Broker, directory: Path) -> Run:
    exporting = asyncio.create_task(_export_and_kill(cluster.nats, directory))
    logs = TokenLogs(broker)
    reading = asyncio.create_task(logs.run())
    load = _Load(cluster, broker, is_disturbed=True)
    began = time.monotonic()
    await load.send_all()
    seconds = time.monotonic() - began
    await eventually(lambda: _has_records(broker, load.answered), SETTLE_SECONDS)
    reading.cancel()
    await logs.read()
    settled = time.monotonic()
    await eventually(lambda: _is_settled(broker), DEADLINE_SECONDS + SETTLE_SECONDS)
    settle_seconds = time.monotonic() - settled
    await _patiently(lambda: _repeat_records(broker))
    exporting.cancel()
    kills = await exporting
    await _export(cluster.nats, directory, "--once")
    found = await _patiently(lambda: _compare(broker, directory, load.answered, logs))
    found |= {"seconds": seconds, "settle_seconds": settle_seconds, "kills": kills}
    return found | load.counts()


class TokenLogs:
    """Tokens that were stored, by the subject of their log; read before the logs expire."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._after = broker, 0
        self._tokens = Counter[str]()

    async def run(self) -> None:
        """Read what is new, again and again, until cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(READ_SECONDS)

    async def read(self) -> None:
        """Read what is new."""
        stream = topology.token_stream_name(0)
        while True:
            page = await _patiently(lambda: self._broker.read_filtered(stream, ">", self._after))
            if not page.messages:
                return
            for message in page.messages:
                record = messages.unpack(message.data)
                if record["type"] == "chunk":
                    stored = record["index"] + record["count"]
                    self._tokens[message.subject] = max(self._tokens[message.subject], stored)
            self._after = page.messages[-1].seq

    def total(self) -> int:
        """Return how many tokens all logs have."""
        return self._tokens.total()


class _Load:
    """All requests with what happens meanwhile, if it is disturbed.

    That are two new prices, the death of each service, and requests that are sent again.
    """

    def __init__(self, cluster: Cluster, broker: Broker, *, is_disturbed: bool) -> None:
        self._cluster, self._broker, self._is_disturbed = cluster, broker, is_disturbed
        self._gateways = [
            RunningGateway(int(url.rpartition(":")[2]), asyncio.Event()) for url in cluster.urls
        ]
        self._unanswered = Counter[str]()
        self._replays = self._new_ids = 0
        self.answered: set[str] = set()

    async def send_all(self) -> None:
        """Send them, some at a time, and return when each is answered or given up."""
        prices = await PriceBook.open(self._broker)
        await _set_price(prices, PRICES[0])
        numbers, events = iter(range(REQUESTS)), {}
        if self._is_disturbed:
            events = self._events(prices)

        async def send_each() -> None:
            for number in numbers:
                if event := events.get(number):
                    await event()
                await self._send(number)

        await asyncio.gather(*(send_each() for _ in range(CONCURRENCY)))
        await prices.close()

    def counts(self) -> dict[str, float]:
        """Return what the clients saw, as figures; print why requests were sent again."""
        print(json.dumps({"unanswered": self._unanswered}), flush=True)
        return {
            "service_kills": len(KILLED),
            "retries": self._unanswered.total(),
            "replays": self._replays,
            "new_ids": self._new_ids,
        }

    def _events(self, prices: PriceBook) -> dict[int, Callable[[], Awaitable[object]]]:
        found: dict[int, Callable[[], Awaitable[object]]] = {
            REQUESTS // 3: partial(_set_price, prices, PRICES[1]),
            2 * REQUESTS // 3: partial(_set_price, prices, PRICES[2]),
        }
        for number, name in enumerate(KILLED, start=1):
            restart = partial(asyncio.to_thread, self._cluster.services[name].restart)
            found[number * REQUESTS // (len(KILLED) + 2) + 1] = restart
        return found

    async def _send(self, number: int) -> None:
        answer = await self._send_until_answered(number)
        if answer is None:
            return
        request_id = answer.headers["x-request-id"]
        self.answered.add(request_id)
        if self._is_disturbed and number % AGAIN_EVERY == 0:
            again = await self._send_until_answered(number)
            self._replays += 1
            self._new_ids += again is None or again.headers["x-request-id"] != request_id

    async def _send_until_answered(self, number: int) -> HttpResponse | None:
        """Send a request to one gateway after the other, always with the same idempotency key."""
        for attempt in range(TRIES):
            gateway = self._gateways[(number + attempt) % len(self._gateways)]
            try:
                answer = await gateway.complete(
                    "word " * (number % 40 + 1),
                    key=f"sk-{TENANT}",
                    headers={"Idempotency-Key": f"request-{number}"},
                    max_tokens=number % LONGEST_ANSWER + 1,
                )
            except (OSError, EOFError) as error:
                self._unanswered[type(error).__name__] += 1
            else:
                if answer.status == 200:
                    return answer
                self._unanswered[f"{answer.status} {answer.error['code']}"] += 1
            await asyncio.sleep(PAUSE_SECONDS)
        return None


async def _patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that may be made again, while a busy machine lets the broker stall."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            return await call()
        except BrokerUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(PAUSE_SECONDS)


async def _set_price(prices: PriceBook, price: Price) -> None:
    await _patiently(lambda: prices.set_price(MODEL, "USD", price))


async def _has_records(broker: Broker, answered: set[str]) -> bool:
    stored = await _patiently(lambda: _read_ledger(broker))
    return answered <= {each.request_id for each in stored}


async def _is_settled(broker: Broker) -> bool:
    """True when the counters are those of the ledger; looks once a second."""
    await asyncio.sleep(1)
    counted = await _patiently(lambda: _read_counters(broker))
    return counted == _bill(await _patiently(lambda: _read_ledger(broker)))


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
    size = ("--segment-bytes", str(SEGMENT_BYTES), "--segment-seconds", "10s")
    options = (*size, "--log-level", "error")
    return await asyncio.create_subprocess_exec(sys.executable, *command, *options, *words)


async def _compare(
    broker: Broker, directory: Path, answered: set[str], logs: TokenLogs
) -> dict[str, float]:
    stored = await _read_ledger(broker)
    records = {each.request_id: each for each in reversed(stored)}  # the first of each counts
    ledger = _bill(records.values())
    prompts = sum(each.billed_tokens[0] for each in records.values())
    month = quota_windows.utc_day(broker.clock.now())[:7]
    exported = await make_invoice(TENANT, month, read_directory(directory))
    direct = await make_invoice(TENANT, month, read_ledger(broker, TENANT))
    bills = {
        "logs": Bill(logs.total() + prompts, ledger.charge),
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


def _bill(records: Iterable[LedgerRecord]) -> Bill:
    found = [(sum(each.billed_tokens[:2]), each.charge) for each in records]
    return Bill(sum(tokens for tokens, _ in found), sum(charge for _, charge in found))


def _bill_of(invoice: messages.Record) -> Bill:
    items = invoice["items"]
    tokens = sum(item["prompt_tokens"] + item["completion_tokens"] for item in items)
    return Bill(tokens, sum(total["amount"] for total in invoice["totals"]))

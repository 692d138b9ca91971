"""Measures a batch at full speed: its pace beside `millstream bench`, memory, and fresh results.

Both run by turns on one `millstream up` with four workers of the mock model: the load generator
with as many requests at once as a batch has, then a batch of `LINES` lines of the same size.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import quantiles

import httpx
from nats.aio.msg import Msg

from bench import bench_command, reporting
from bench.reporting import Figure, Run
from jobs.settings import JobsSettings
from millstream.bench.cpu_usage import MeasuredProcess
from streams import job_subjects
from streams.accounts.access import UserClass
from streams.broker.broker_client import Broker, connect
from streams.records.jobs.result_store import read_result
from tests.support.millstream_up import KEY, MillstreamUp

LINES, EARLY_LINES = 20_000, 5_000
WORKERS, TTFT_MS, ITL_MS = 4, 20, 5
PROMPT_LETTERS, TOKENS = 64, 16
TENANT = "default"
CHAT = "/v1/chat/completions"
PROBED_SHARE = 0.01  # of the lines, whose results are asked for as soon as they are stored
POLL_SECONDS = 0.25
ITEM_READS = 200
SERVICES = ("gateway", "dispatcher", "jobs", "worker", "nats-server")
WORDS = (
    *("--model", "mock", "--workers", str(WORKERS), "--api-key", KEY),
    *("--mock-ttft-ms", str(TTFT_MS), "--mock-itl-ms", str(ITL_MS)),
)

FIGURES = (
    Figure("bench_per_second", "requests/s of `millstream bench`"),
    Figure("batch_per_second", f"lines/s of a batch of {LINES:,}"),
    Figure("share", "share", "≥ 0.9"),
    Figure("readable_p50_ms", "an end until its line is readable, p50, ms"),
    Figure("readable_p99_ms", "an end until its line is readable, p99, ms", "≤ 100"),
    Figure("item_p50_ms", "GET of one line beside it, p50, ms"),
    Figure("item_cpu_ms", "GET of one line later, CPU of the gateway, ms", "≤ 5"),
    *(
        Figure(
            f"{name}_growth_mib",
            f"{name}, memory at {LINES:,} lines less that at {EARLY_LINES:,}, MiB",
            "" if name == "nats-server" else "≤ 20",
        )
        for name in SERVICES
    ),
    *(Figure(f"{name}_mib", f"{name}, memory at {LINES:,} lines, MiB") for name in SERVICES),
)


@dataclass
class Seen:
    """Observations of a batch while it ran; times are of the monotonic clock, in seconds."""

    first: float = 0.0
    last: float = 0.0
    stored: int = 0
    readable: list[float] = field(default_factory=list)  # milliseconds
    items: list[float] = field(default_factory=list)  # milliseconds
    early: dict[str, float] = field(default_factory=dict)  # MiB by service
    late: dict[str, float] = field(default_factory=dict)
    item_cpu: float = 0.0  # milliseconds

    @property
    def per_second(self) -> float:
        return (self.stored - 1) / (self.last - self.first)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, each on a fresh `millstream up`, and publish."""
    setting = {
        "lines": LINES,
        "workers": WORKERS,
        "mock_ttft_ms": TTFT_MS,
        "mock_itl_ms": ITL_MS,
        "tokens": TOKENS,
        "bench_seconds": seconds,
    }
    reporting.publish("jobs", setting, FIGURES, [_run(seconds) for _ in range(runs)])


def _run(seconds: float) -> Run:
    with tempfile.TemporaryDirectory() as home, MillstreamUp(Path(home), *WORDS) as up:
        up.wait_until_ready()
        before = _bench(up, seconds)
        seen = asyncio.run(_run_batch(up))
        after = _bench(up, seconds)
    alone, p99 = (before + after) / 2, quantiles(seen.readable, n=100)
    return {
        "bench_per_second": alone,
        "batch_per_second": seen.per_second,
        "share": seen.per_second / alone,
        "readable_p50_ms": p99[49],
        "readable_p99_ms": p99[98],
        "item_p50_ms": quantiles(seen.items, n=100)[49],
        "item_cpu_ms": seen.item_cpu,
        **{f"{name}_growth_mib": seen.late[name] - seen.early[name] for name in SERVICES},
        **{f"{name}_mib": seen.late[name] for name in SERVICES},
    }


def _bench(up: MillstreamUp, seconds: float) -> float:
    """Requests/s of the load generator with as many at once as a batch has under way."""
    window = JobsSettings.model_fields["batch_window"].default
    words = ["--concurrency", str(window), "--duration", str(seconds), "--priority", "batch"]
    words += ["--prompt-tokens", str(PROMPT_LETTERS), "--output-tokens", str(TOKENS)]
    return float(bench_command.measure_up(up, *words)["requests_per_second"])


def make_lines(count: int) -> bytes:
    """Return an input of `count` chats with the ids `id-0`, `id-1` …"""
    letters = Random(1)
    return b"".join(
        json.dumps(
            {
                "custom_id": f"id-{index}",
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": "mock",
                    "messages": [{"role": "user", "content": _words(letters)}],
                    "max_tokens": TOKENS,
                },
            }
        ).encode()
        + b"\n"
        for index in range(count)
    )


def _words(letters: Random) -> str:
    return "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=PROMPT_LETTERS))


async def create_batch(client: httpx.AsyncClient, lines: bytes) -> str:
    """Store an input and create its batch; return the batch's id."""
    file = await client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", lines)}
    )
    body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    made = await client.post("/v1/batches", json=body)
    made.raise_for_status()
    return str(made.json()["id"])


@asynccontextmanager
async def gateway_client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway with the key of `millstream up`."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        yield client


async def _run_batch(up: MillstreamUp) -> Seen:
    seen, files = Seen(), up.files(UserClass.JOBS)
    async with (
        gateway_client(up.url) as client,
        connect(up.nats_url, "bench", files) as broker,
        asyncio.TaskGroup() as tasks,
    ):
        batch = await create_batch(client, make_lines(LINES))

        async def on_result(msg: Msg) -> None:
            now = time.monotonic()
            seen.first, seen.last = seen.first or now, now
            seen.stored += 1
            index = int(msg.subject.rsplit(".", 1)[1])
            if not index % round(1 / PROBED_SHARE):
                tasks.create_task(_probe(broker, client, batch, index, seen))

        job = batch.removeprefix("batch_")
        heard = await broker.subscribe(job_subjects.resulted(TENANT, job), on_result)
        while True:
            found = (await client.get(f"/v1/batches/{batch}")).json()
            if not seen.early and seen.stored >= EARLY_LINES:
                seen.early = _memory(up)
            if found["status"] not in ("validating", "in_progress"):
                break
            await asyncio.sleep(POLL_SECONDS)
        seen.late = _memory(up)
        while found["status"] == "finalizing":
            await asyncio.sleep(POLL_SECONDS)
            found = (await client.get(f"/v1/batches/{batch}")).json()
        await heard.unsubscribe()
        seen.item_cpu = await _measure_items(up, client, batch)
    assert found["request_counts"]["completed"] == LINES, found
    return seen


async def _probe(
    broker: Broker, client: httpx.AsyncClient, batch: str, index: int, seen: Seen
) -> None:
    """Ask for a line that has just ended, until it is there."""
    while True:
        began = time.monotonic()
        found = (await client.get(f"/v1/batches/{batch}/items/id-{index}")).json()
        now, answered = time.time(), time.monotonic()
        if found["status"] != "pending":
            break
    result = await read_result(broker, TENANT, batch.removeprefix("batch_"), index)
    assert result
    seen.readable.append(now * 1000 - result.ended)
    seen.items.append((answered - began) * 1000)


async def _measure_items(up: MillstreamUp, client: httpx.AsyncClient, batch: str) -> float:
    """Milliseconds of the gateway's CPU time for the GET of one line, of many all over the file."""
    (pid,) = up.pids("gateway")
    gateway = MeasuredProcess("gateway", pid)
    before = gateway.cpu_seconds() or 0.0
    for number in range(ITEM_READS):
        index = number * LINES // ITEM_READS
        found = await client.get(f"/v1/batches/{batch}/items/id-{index}")
        assert found.json()["index"] == index
    return 1000 * ((gateway.cpu_seconds() or 0.0) - before) / ITEM_READS


def _memory(up: MillstreamUp) -> dict[str, float]:
    """Resident memory of each kind of service, in MiB; of the largest process of a kind."""
    return {name: max(map(_resident_mib, up.pids(name))) for name in SERVICES}


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024

"""Measures what abusive clients cost others: idle sockets, clients that do not read, cancel storms.

The services are processes of their own; the clients are in this one. Inter-token times are those of
honest streams, before (`quiet`) and during the abuse.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench import reporting
from bench.raw_websockets import RawWebSocket, StreamingClients
from bench.reporting import Figure, Run
from millstream.bench.load_statistics import percentile
from registry.models import mock_model
from registry.store import Registry
from streams.broker.broker_client import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, register
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess, service_process

IDLE, TALKING = 10_000, 64
READING, NOT_READING, ANSWERS = 800, 200, 2
A_SECOND, RUNNING_SECONDS, SOCKETS = 1000, 0.2, 8
KIB = 1024
TENANT = f"""
[tenants.acme]
keys = ["{KEY}"]
max_queued = 100_000
max_connections = 100_000
frames_per_second = 100_000
"""
STALLED = 'millstream_cut_connections_total{reason="stalled"}'

INTER_TOKEN = (
    Figure("quiet_p99_ms", "inter-token p99 of honest streams without abuse, ms"),
    Figure("p99_ms", "inter-token p99 of honest streams beside it, ms"),
    Figure("slower_percent", "slower by, %", "≤ 10"),
)
IDLE_FIGURES = (
    Figure("each_kib", f"memory of each of {IDLE:,} idle sockets, KiB", "≤ 40"),
    *INTER_TOKEN,
)
UNREAD_FIGURES = (
    Figure("each_kib", f"memory of each of {NOT_READING} clients that do not read, KiB", "≤ 256"),
    Figure("kernel_kib", "largest send queue of one in the gateway's kernel, KiB"),
    Figure("cut_seconds", "from the last one's connection until all are cut, s", "about 10"),
    *INTER_TOKEN,
)
CANCEL_FIGURES = (
    Figure("a_second", "requests begun and cancelled, per second", "1,000"),
    Figure("p50_ms", "from a request's cancel to its end, p50, ms"),
    Figure("p99_ms", "from a request's cancel to its end, p99, ms", "≤ 1,000"),
    Figure("free_seconds", "from the last cancel until no request runs, s", "≤ 1"),
    Figure("refused", "refused requests", "0"),
    Figure("left_requests", "requests still followed by the gateway", "0"),
    Figure("left_descriptors", "additional open descriptors of all services", "0"),
    Figure("gateway_mib", "growth of the gateway's memory after a tenth of them, MiB"),
    Figure("dispatcher_mib", "growth of the dispatcher's memory since then, MiB"),
    Figure("worker_mib", "growth of the worker's memory since then, MiB"),
)


def idle(runs: int, seconds: float) -> None:
    """Measure and publish the cost of sockets that send nothing."""
    _measure_and_publish("idle", IDLE_FIGURES, runs, seconds, _idle)


def unread(runs: int, seconds: float) -> None:
    """Measure and publish the cost of clients that request half a megabyte and do not read it."""
    _measure_and_publish("unread", UNREAD_FIGURES, runs, seconds, _unread)


def cancels(runs: int, seconds: float) -> None:
    """Measure and publish the cost of requests that are cancelled while they run.

    There are 1,000 a second for `seconds`; 100 seconds make 100,000.
    """
    _measure_and_publish("cancels", CANCEL_FIGURES, runs, seconds, _cancels)


def _measure_and_publish(
    name: str,
    figures: tuple[Figure, ...],
    runs: int,
    seconds: float,
    run: Callable[[float], Coroutine[Any, Any, Run]],
) -> None:
    found = [uvloop.run(run(seconds)) for _ in range(runs)]
    reporting.publish(f"abuse-{name}", {"seconds": seconds}, figures, found)


@dataclass(frozen=True)
class Cell:
    """A running gateway with its dispatcher, worker and nats-server."""

    gateway: RunningGateway
    services: dict[str, ServiceProcess]

    def memory(self, name: str) -> int:
        """Return the resident memory of a service in KiB."""
        status = Path(f"/proc/{self.services[name].process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)

    def descriptors(self) -> int:
        """Return the number of open file descriptors of all services together."""
        pids = [service.process.pid for service in self.services.values()]
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


@asynccontextmanager
async def _start_cell(itl_ms: float, sequences: int) -> AsyncIterator[Cell]:
    port = free_port()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        home = Path(directory)
        (home / "tenants.toml").write_text(TENANT)
        settings: dict[str, dict[str, Any]] = {
            "admin": {"config": home / "tenants.toml"},
            "gateway": {"port": port, "grace_seconds": 1},
            "dispatcher": {},
            "worker": {"model": '["mock", "quick"]'},
        }
        broker = NatsServer(home)
        stack.callback(broker.kill)
        await register(broker.url, ttft_ms=20, itl_ms=itl_ms, sequences=sequences)
        await _register_quick(broker.url)
        services = {
            name: stack.enter_context(service_process(name, broker.url, home / name, **words))
            for name, words in settings.items()
        }
        cell = Cell(RunningGateway(port, asyncio.Event()), services)
        await eventually(cell.gateway.is_ready, 60)
        yield cell


async def _register_quick(nats_url: str) -> None:
    """Register a model that gives long answers almost at once."""
    async with connect(nats_url, "bench") as broker:
        registry = await Registry.open(broker)
        await registry.add_model(mock_model("quick", ttft_ms=1, itl_ms=1))
        await registry.close()


async def _idle(seconds: float) -> Run:
    async with _start_cell(itl_ms=20, sequences=TALKING) as cell:
        port = cell.gateway.port
        talkers = StreamingClients(port, KEY, tokens=200)
        await talkers.open(TALKING, 2)
        quiet = await talkers.measure_gaps(seconds)
        before = cell.memory("gateway")
        peers = [await RawWebSocket.connect(port, KEY, _ignore) for _ in range(IDLE)]
        each = (cell.memory("gateway") - before) / IDLE
        disturbed = await talkers.measure_gaps(2 * seconds)
        for peer in peers:
            peer.transport.abort()
        await asyncio.sleep(3)
        quiet += await talkers.measure_gaps(seconds)
        talkers.close()
    return {"each_kib": each, **_compare(quiet, disturbed)}


async def _unread(seconds: float) -> Run:
    async with _start_cell(itl_ms=250, sequences=READING + NOT_READING) as cell:
        port = cell.gateway.port
        request_id = await _long_answer(port)
        talkers, others = (
            StreamingClients(port, KEY, tokens=400),
            StreamingClients(port, KEY, tokens=400),
        )
        await talkers.open(READING, 10)
        await others.open(NOT_READING, 2)
        quiet = await talkers.measure_gaps(seconds)
        others.close()
        await asyncio.sleep(3)
        before = cell.memory("gateway")
        measuring = asyncio.create_task(talkers.measure_gaps(seconds + 12))
        non_readers = []
        for _ in range(NOT_READING):
            non_readers.append(await _connect_non_reader(port, request_id))
            await asyncio.sleep(seconds / 2 / NOT_READING)
        began, most, kernel = time.perf_counter(), 0.0, 0
        async with asyncio.timeout(60):
            while await _count_stalled(cell.gateway) < NOT_READING:
                most = max(most, (cell.memory("gateway") - before) / NOT_READING)
                kernel = max(kernel, _largest_send_queue(port))
                await asyncio.sleep(0.25)
        cut_seconds = time.perf_counter() - began
        disturbed = await measuring
        talkers.close()
    found = {"each_kib": most, "kernel_kib": kernel / KIB, "cut_seconds": cut_seconds}
    return {**found, **_compare(quiet, disturbed)}


async def _long_answer(port: int) -> str:
    """Run a request whose answer is about 220 KB, and return its id when it has ended."""
    ids: list[str] = []
    ended = asyncio.get_running_loop().create_future()

    def on_frame(peer: RawWebSocket, frame: dict[str, Any]) -> None:
        if frame["type"] == "accepted":
            ids.append(frame["request_id"])
        elif frame["type"] in ("done", "error"):
            ended.set_result(frame["type"])

    peer = await RawWebSocket.connect(port, KEY, on_frame)
    prompt = {"prompt": "x", "max_tokens": 400, "logprobs": 20}
    peer.send_frame(type="generate", id="x", model="quick", **prompt)
    assert await ended == "done"
    peer.transport.abort()
    return ids[0]


async def _connect_non_reader(port: int, request_id: str) -> RawWebSocket:
    """Connect a client that requests the same answer several times and reads nothing."""
    peer = await RawWebSocket.connect(port, KEY, _ignore, buffer=4096)
    peer.transport.pause_reading()
    for number in range(ANSWERS):
        peer.send_frame(type="resume", id=str(number), request_id=request_id, after=-1)
    return peer


async def _count_stalled(gateway: RunningGateway) -> float:
    text = (await gateway.request("GET", "/metrics", key=None)).body.decode()
    found = (line for line in text.splitlines() if line.startswith(STALLED))
    return float(next(found, "x 0").split()[-1])


def _largest_send_queue(port: int) -> int:
    """The largest send queue, in bytes, that the kernel keeps for one of the gateway's sockets."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    local = f":{port:04X}"
    return max(int(row[4].split(":")[0], 16) for row in rows if row[1].endswith(local))


async def _cancels(seconds: float) -> Run:
    async with _start_cell(itl_ms=20, sequences=1024) as cell:
        port = cell.gateway.port
        count = int(A_SECOND * seconds)
        await _Storm.run(port, count // 10)
        before, descriptors = (
            {name: cell.memory(name) for name in cell.services},
            cell.descriptors(),
        )
        storm = await _Storm.run(port, count)
        await asyncio.sleep(2)
        grown = {f"{n}_mib": (cell.memory(n) - kib) / KIB for n, kib in before.items()}
        left = cell.descriptors() - descriptors
        return {
            **storm.figures(),
            **grown,
            "left_requests": await cell.gateway.followed_requests(),
            "left_descriptors": left,
        }


class _Storm:
    """Starts requests at a steady rate and cancels each after `RUNNING_SECONDS`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._cancelled: dict[str, float] = {}
        self._waits: list[float] = []
        self._began = self._loop.time()
        self._last_cancel = self._ended = 0.0
        self._refused = 0

    @classmethod
    async def run(cls, port: int, count: int) -> "_Storm":
        """Start and cancel `count` requests; return when all of them have ended."""
        storm = cls()
        peers = [await RawWebSocket.connect(port, KEY, storm._receive) for _ in range(SOCKETS)]
        storm._began = storm._loop.time()
        for number in range(count):
            storm._start_request(peers[number % SOCKETS], str(number))
            early = storm._began + number / A_SECOND - storm._loop.time()
            if early > 0.005:
                await asyncio.sleep(early)
        await eventually(lambda: len(storm._waits) + storm._refused == count, 120)
        for peer in peers:
            peer.transport.abort()
        return storm

    def figures(self) -> Run:
        """The figures of `CANCEL_FIGURES` that concern requests."""
        waits = sorted(self._waits)
        return {
            "a_second": len(waits) / (self._last_cancel - self._began),
            "p50_ms": percentile(waits, 0.5) * 1000,
            "p99_ms": percentile(waits, 0.99) * 1000,
            "free_seconds": self._ended - self._last_cancel,
            "refused": self._refused,
        }

    def _start_request(self, peer: RawWebSocket, id: str) -> None:
        peer.send_frame(type="generate", id=id, model="mock", prompt="x", max_tokens=4000)
        self._loop.call_later(RUNNING_SECONDS, self._cancel, peer, id)

    def _cancel(self, peer: RawWebSocket, id: str) -> None:
        self._cancelled[id] = self._last_cancel = self._loop.time()
        peer.send_frame(type="cancel", id=id)

    def _receive(self, peer: RawWebSocket, frame: dict[str, Any]) -> None:
        if frame["type"] == "done":
            self._ended = self._loop.time()
            self._waits.append(self._ended - self._cancelled.pop(frame["id"]))
        elif frame["type"] == "error" and frame["code"] != "request_not_found":
            self._refused += 1


def _ignore(peer: RawWebSocket, frame: dict[str, Any]) -> None:
    """Ignore the frame."""


def _compare(quiet: list[float], disturbed: list[float]) -> Run:
    before, during = (percentile(sorted(gaps), 0.99) * 1000 for gaps in (quiet, disturbed))
    return {
        "quiet_p99_ms": before,
        "p99_ms": during,
        "slower_percent": (during / before - 1) * 100,
    }

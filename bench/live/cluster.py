"""Runs a whole Millstream on this machine: nats-server, dispatcher, gateways and workers."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millstream.bench.cpu_usage import OWN_PROCESS, MeasuredProcess
from millstream.bench.http_connection import get_json
from millstream.bench.load_client import GatewayAddress, Unreachable
from registry.models import LatencyGoals, Model, mock_model
from registry.store import Registry
from simulation.step_model import StepModel
from streams.base_settings import ENV_PREFIX
from streams.broker.broker_client import connect
from streams.subjects import Priority
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.versions import make_version

MODEL = "mock"
STEPPED, MOCK = "bench.live.stepped_worker", "millstream"
READY_SECONDS = 180.0


@dataclass(frozen=True)
class ClusterShape:
    """The system to start: tenants, number of processes, the workers' engine, and the limits.

    `options` are the engine's; `goal_ms` is the goal for the time to first token, if any; `quotas`
    are those of each tenant; `ledger_bytes` is the size of the ledger, if another than by default.
    """

    tenants: Mapping[str, float]  # name -> weight
    options: Mapping[str, object]
    workers: int = 1
    gateways: int = 2
    program: str = STEPPED  # the module that the workers run
    goal_ms: float | None = None
    deadline_seconds: float = 600.0
    max_queued: int = 1000
    quotas: Mapping[str, float] = field(default_factory=dict)
    jobs: int = 0
    ledger_bytes: int | None = None

    @property
    def model(self) -> Model:
        """The model to register, with the engine's options and the latency goal."""
        version = make_version(options=dict(self.options), context_length=1 << 15)
        goals = {Priority.STANDARD: LatencyGoals(time_to_first_token_ms=self.goal_ms)}
        update = {"versions": {version.id: version}, "goals": goals if self.goal_ms else {}}
        return mock_model(MODEL).model_copy(update=update)


def engine_options(model: StepModel) -> dict[str, object]:
    """Return a step model as options of a `SteppedEngine`."""
    return {"model": asdict(model)}


@dataclass
class Cluster:
    """A running system with a meter of its processes' CPU; `urls` are those of its gateways."""

    nats: str
    home: Path
    urls: Sequence[str]
    processes: list[MeasuredProcess] = field(default_factory=list)
    services: dict[str, "Service"] = field(default_factory=dict)  # by name, such as `worker-0`
    _began: dict[MeasuredProcess, float] = field(default_factory=dict)
    _at: float = 0.0

    def address(self, tenant: str, gateway: int) -> GatewayAddress:
        """Return the address of a gateway, by its number, with the tenant's API key."""
        return GatewayAddress(self.urls[gateway % len(self.urls)], _key(tenant))

    def start_cpu_meter(self) -> None:
        """Begin to measure the CPU time that each process uses."""
        self._began = {process: process.cpu_seconds() or 0.0 for process in self.processes}
        self._at = time.monotonic()

    def cores_used(self) -> dict[str, float]:
        """Return CPU seconds per second since `start_cpu_meter`, summed by process name."""
        elapsed = time.monotonic() - self._at
        cores: dict[str, float] = {}
        for process, before in self._began.items():
            used = ((process.cpu_seconds() or before) - before) / elapsed
            cores[process.name] = cores.get(process.name, 0.0) + used
        return cores

    def computed_tokens(self) -> dict[str, int]:
        """Return by request id the tokens that workers computed for requests that have ended there.

        Tokens that were computed again are counted each time. They are read from the workers' logs.
        """
        computed: dict[str, int] = {}
        for event in self._events("computed"):
            request_id = event["request_id"]
            computed[request_id] = computed.get(request_id, 0) + event["tokens"]
        return computed

    def _events(self, name: str) -> Iterator[dict[str, Any]]:
        for file in self.home.glob("worker-*.log"):
            with file.open() as lines:
                yield from (json.loads(line) for line in lines if f'"{name}"' in line)


def _key(tenant: str) -> str:
    return f"sk-{tenant}"


@asynccontextmanager
async def run_cluster(shape: ClusterShape) -> AsyncIterator[Cluster]:
    """Start the whole system and wait until it is ready; it is killed at the end of the context."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (home / "nats").mkdir()
        server = NatsServer(home / "nats")
        stack.callback(server.kill)
        ports = [free_port() for _ in range(shape.gateways)]
        cluster = Cluster(server.url, home, [f"http://127.0.0.1:{port}" for port in ports])
        cluster.processes += [OWN_PROCESS, MeasuredProcess("nats", server.process.pid)]
        tenants = home / "tenants.toml"
        tenants.write_text(_tenant_tables(shape))
        for name, command, settings in _services(shape, ports, tenants):
            service = Service(home / f"{name}.log", command, {"nats": server.url, **settings})
            stack.callback(service.kill)
            cluster.services[name] = service
            cluster.processes.append(MeasuredProcess(name.partition("-")[0], service.pid))
        await _register(server.url, shape.model)
        keys = [_key(tenant) for tenant in shape.tenants]
        for url in cluster.urls:
            await eventually(lambda url=url: _is_ready(url, keys), READY_SECONDS)  # type: ignore[misc]
        yield cluster


def _tenant_tables(shape: ClusterShape) -> str:
    """The tenants as tables of the admin service's configuration file."""
    lines: list[str] = []
    for name, weight in shape.tenants.items():
        lines += [f"[tenants.{name}]", f'keys = ["{_key(name)}"]']
        lines += [f"weight = {weight}", f"max_queued = {shape.max_queued}"]
        lines += [f"{quota} = {limit}" for quota, limit in shape.quotas.items()]
    return "\n".join(lines)


def _services(
    shape: ClusterShape, ports: Sequence[int], tenants: Path
) -> Iterator[tuple[str, Sequence[str], Mapping[str, object]]]:
    """The name, command and settings of each process."""
    limits = {"default_deadline_seconds": shape.deadline_seconds}
    ledger = {"ledger_bytes": shape.ledger_bytes} if shape.ledger_bytes else {}
    yield "admin", (MOCK, "admin", "--config", str(tenants)), ledger
    for number, port in enumerate(ports):
        yield f"gateway-{number}", (MOCK, "gateway"), {"port": port, **limits}
    yield "dispatcher", (MOCK, "dispatcher"), {}
    for number in range(shape.jobs):
        yield f"jobs-{number}", (MOCK, "jobs"), {}
    for number in range(shape.workers):
        words = (shape.program,) if shape.program == STEPPED else (shape.program, "worker")
        yield f"worker-{number}", words, {"model": json.dumps([MODEL])}


class Service:
    """One service of the system as a process of its own, started when this is made."""

    def __init__(self, log: Path, words: Sequence[str], settings: Mapping[str, object]) -> None:
        kept = {name: v for name, v in os.environ.items() if not name.startswith(ENV_PREFIX)}
        own = {ENV_PREFIX + name.upper(): str(value) for name, value in settings.items()}
        self._log, self._words, self._environment = log, words, {**kept, **own}
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The id of the process that runs now."""
        return self._process.pid

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Kill the process and start another one in its place."""
        self.kill()
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", *self._words],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )


async def _register(nats: str, model: Model) -> None:
    async with connect(nats, "bench") as broker:
        registry = await Registry.open(broker, seconds=READY_SECONDS)
        await registry.add_model(model)
        await registry.close()


async def _is_ready(url: str, keys: Sequence[str]) -> bool:
    """True if a gateway can serve requests, and knows the tenants' keys."""
    asked = [(GatewayAddress(url, None), "/readyz")]
    asked += [(GatewayAddress(url, key), "/v1/models") for key in keys]
    try:
        found = [await get_json(address, path, time.monotonic) for address, path in asked]
    except Unreachable:
        await asyncio.sleep(0.2)
        return False
    return all(status == 200 for status, _ in found)

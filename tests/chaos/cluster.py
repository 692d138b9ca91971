"""A whole Millstream as processes of the operating system: brokers, services, and who is who."""

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from millstream.admin.admin_client import AdminRefused, AdminUnreachable, NatsAdminClient
from registry.models import mock_model
from registry.store import Registry
from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.private_file import write_whole
from streams.accounts.rights import Pins
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.coordination import lease_bucket
from streams.errors import BrokerUnavailable
from tests.chaos import wall_clock
from tests.chaos.broker_cluster import BrokerCluster
from tests.chaos.plan import TENANTS, ClusterShape
from tests.chaos.slow_client import SlowClient
from tests.chaos.wall_clock import WallClock
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess

MODEL, SYSTEM = "mock", "system"
KEYS = {tenant: f"sk-{tenant}" for tenant in TENANTS}
BATCH_WINDOW = 2  # lines at once, so that a batch is there when a fault strikes
SHARDS = {1: 1, 3: 3}  # token log streams by nodes, as shipped
READY_SECONDS = 90
STOP_SECONDS = 45  # longer than a service may take to drain
FAILING = Path(__file__).parent / "failing"
KINDS = ("nats", "admin", "gateway", "dispatcher", "jobs", "worker")
READY = {
    "admin": "admin_listening",
    "gateway": "listening",
    "dispatcher": "members_changed",
    "jobs": "jobs_running",
    "worker": "model_ready",
}

LEASES = {"admin": "admin", "dispatcher": f"dispatcher.{MODEL}"}  # by which a kind has a leader


@dataclass(frozen=True)
class Footprint:
    """What a process holds: resident bytes and open descriptors."""

    pid: int
    rss: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> "Footprint | None":
        """None once it is gone."""
        process = Path(f"/proc/{pid}")
        try:
            pages = int((process / "statm").read_text().split()[1])
            descriptors = len(list((process / "fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            return None
        return cls(pid, pages * os.sysconf("SC_PAGE_SIZE"), descriptors)


class Cluster:
    """The processes of one run by name: `worker-0`, `gateway-1`, `nats-2`, …"""

    def __init__(self, shape: ClusterShape, home: Path) -> None:
        self.shape, self._home = shape, home
        self.shards = SHARDS[shape.nodes]
        self.cell = CellDirectory.create(home / "keys", self.shards)
        self.brokers = BrokerCluster(self.cell, shape.nodes, shape.can_partition, shape.small_disk)
        self.services: dict[str, ServiceProcess] = {}
        self.readers: dict[str, SlowClient] = {}
        self.clocks: dict[str, WallClock] = {}
        self.held_limits: dict[str, asyncio.Task[None]] = {}  # by stream: keep it edited
        self._starts = Counter[str]()
        self._ports = [free_port() for _ in range(shape.gateways)]

    @property
    def gateways(self) -> list[str]:
        return [f"ws://127.0.0.1:{port}/v1/stream" for port in self._ports]

    async def start(self) -> None:
        """Returns when every service is ready."""
        await self.brokers.start()
        for name in (*self._names(), SYSTEM):
            self.add_user(name)
        self._write_configuration()
        if self.shape.own_clocks:
            self._give_clocks(wall_clock.build_library(self._home))
        for name in self._names():
            await self.start_service(name)
        async with connect(self.brokers.direct, "chaos") as broker:
            await declaration.wait_for_stream(broker, topology.WORK, READY_SECONDS)
            await self._register(broker)
            await eventually(lambda: self.leader(broker, LEASES["dispatcher"]), READY_SECONDS)
        await eventually(lambda: all(map(self.is_ready, self.services)), READY_SECONDS)
        await self.issue_credentials()

    async def issue_credentials(self) -> None:
        """Give each tenant's producer credentials, or new ones, as an operator asks for them."""
        async with connect(self.brokers.direct, "chaos") as broker:
            admin = NatsAdminClient(broker)
            for tenant in TENANTS:
                found = await eventually(partial(_issue, admin, tenant), READY_SECONDS)
                write_whole(self.producer_file(tenant), found["credentials"])

    def producer_file(self, tenant: str) -> Path:
        """The credentials of a tenant's producer."""
        return self._home / f"{tenant}.creds"

    def add_user(self, name: str) -> None:
        """Give a process credentials, or new ones, which it takes up while it runs.

        A worker's are for its model alone.
        """
        kind = name.partition("-")[0]
        pins = Pins(name, ((MODEL, "*"),) if kind == "worker" else None)
        self.cell.add_user(name, UserClass(kind), pins)

    def _give_clocks(self, library: Path) -> None:
        for name in self._names():
            self.clocks[name] = WallClock(library, self._home / f"{name}.clock")

    async def close(self) -> None:
        for service in self.services.values():
            service.kill()
        await self.brokers.close()

    async def start_service(self, name: str) -> None:
        """Start a service under its name; for the first time or again."""
        kind = name.partition("-")[0]
        settings = self._settings(name) | {"nats": self.brokers.urls(name)}
        self._starts[name] += 1  # a log for each: `said` is of this process
        log = self._home / f"{name}-{self._starts[name]}.log"
        self.services[name] = ServiceProcess(kind, log, settings, self._environment(name))

    async def stop_service(self, name: str) -> None:
        """SIGTERM, and wait until it has drained."""
        service = self.services[name]
        service.terminate()
        await eventually(lambda: service.process.poll() is not None, STOP_SECONDS)

    def is_ready(self, name: str) -> bool:
        return self.services[name].has_logged(READY[name.partition("-")[0]])

    async def wait_until_ready(self, name: str) -> None:
        """Wait until a service that was started serves, or stands by."""
        await eventually(lambda: self.is_ready(name), READY_SECONDS)

    async def resolve_targets(self, whom: str, random: Random) -> list[str]:
        """Each name that is given; for that of a kind one of its processes: who leads, or any."""
        return [await self._resolve(each, random) for each in whom.split()]

    async def _resolve(self, whom: str, random: Random) -> str:
        if whom not in KINDS:
            return whom
        async with connect(self.brokers.direct, "chaos") as broker:
            if whom in LEASES:
                return await eventually(lambda: self.leader(broker, LEASES[whom]))
            if whom == "nats":
                return await self._stream_leader(broker, random)
        return random.choice([name for name in self.services if name.startswith(whom)])

    async def leader(self, broker: Broker, lease: str) -> str:
        """The process that holds a lease; empty while none does."""
        key = lease_bucket.key_subject(subjects.escape(lease))
        try:
            found = await broker.read(lease_bucket.STREAM, {"last_by_subj": key})
        except BrokerUnavailable:  # the bucket is made by the first admin service
            return ""
        return found[0].data.decode().partition(".")[0] if found else ""

    def footprints(self) -> dict[str, Footprint]:
        """Of every service that lives."""
        return dict(_footprints((name, each.process.pid) for name, each in self.services.items()))

    def brokers_footprints(self) -> dict[str, Footprint]:
        """Of every broker that lives; most of it is what the streams hold."""
        nodes = enumerate(self.brokers.nodes)
        return dict(_footprints((f"nats-{number}", node.process.pid) for number, node in nodes))

    async def _stream_leader(self, broker: Broker, random: Random) -> str:
        """The node that leads the requests, the work, or a shard of the token logs."""
        stream = random.choice([topology.REQUESTS, topology.WORK, topology.token_stream_name(0)])
        info = await broker.js.stream_info(stream)
        assert info.cluster
        assert info.cluster.leader
        return str(info.cluster.leader)

    async def _register(self, broker: Broker) -> None:
        shape = self.shape
        pace: dict[str, Any] = {"ttft_ms": shape.ttft_ms, "itl_ms": shape.itl_ms}
        registry = await Registry.open(broker)
        await registry.add_model(mock_model(**pace, sequences=shape.sequences))
        await registry.close()

    def _names(self) -> Iterator[str]:
        shape = self.shape
        counts = {"admin": shape.dispatchers, "gateway": shape.gateways}  # a standby for each, too
        counts |= {"dispatcher": shape.dispatchers, "jobs": shape.dispatchers}
        counts |= {"worker": shape.workers}
        for kind, count in counts.items():
            yield from (f"{kind}-{number}" for number in range(count))

    def _environment(self, name: str) -> dict[str, str]:
        clock = self.clocks.get(name)
        path = os.pathsep.join([str(FAILING), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        failing = {"PYTHONPATH": path} if self.shape.can_fail else {}
        return failing | (clock.environment if clock else {})

    def _settings(self, name: str) -> dict[str, Any]:
        kind, _, number = name.partition("-")
        own: dict[str, dict[str, Any]] = {
            "gateway": {"port": self._ports[int(number)]} if kind == "gateway" else {},
            "admin": {"broker_keys": self.cell.path},
            "jobs": {"batch_window": BATCH_WINDOW},
            "worker": {"model": f'["{MODEL}"]'},
        }
        return {
            "id": name,
            "nats_creds": self.cell.user_file(name),
            "config": self._home / "millstream.toml",
            "replicas": self.shape.nodes,
            "shards": self.shards,
            **own.get(kind, {}),
        }

    def _write_configuration(self) -> None:
        tables = [
            f'[tenants.{tenant}]\nkeys = ["{key}"]\npublishes = true\n'
            for tenant, key in KEYS.items()
        ]
        (self._home / "millstream.toml").write_text("".join(tables))


async def _issue(admin: NatsAdminClient, tenant: str) -> dict[str, Any] | None:
    """A tenant's new credentials; None where no admin service can issue them now."""
    try:
        return await admin.call("credentials.issue", name=tenant)
    except (AdminRefused, AdminUnreachable, BrokerUnavailable):
        return None


def _footprints(processes: Iterable[tuple[str, int]]) -> Iterator[tuple[str, Footprint]]:
    for name, pid in processes:
        if footprint := Footprint.of(pid):
            yield name, footprint

"""The brokers of a run: one with the embedded settings, or three with a cluster's, as shipped.

They know the accounts and users of a cell of the run's own, and observers.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from millstream.up import health_probe
from streams.accounts.cell_directory import CellDirectory
from streams.accounts.server_configuration import (
    ROUTES_USER,
    embedded_configuration,
    node_configuration,
)
from tests.chaos import network_partition
from tests.support.accounts_server import find_violations, guard, observed_accounts
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port

DISK_MIB = 64
READY_SECONDS = 60
ASK_SECONDS = 2.0


class BrokerCluster:
    """Nodes by number. With `linked`, each is reached over wires that can be cut."""

    def __init__(self, cell: CellDirectory, count: int, linked: bool, small_disk: bool) -> None:
        self._cell, self._home = cell, cell.path.parent
        self.count, self._linked, self._small = count, linked, small_disk
        self.ports = [free_port() for _ in range(count)]
        self._cluster_ports = [free_port() for _ in range(count)]
        self._monitors = [free_port() for _ in range(count)]
        self.nodes: list[NatsServer] = []
        self._ends = [f"nats-{number}" for number in range(count)]  # of wires, by number

    async def start(self) -> None:
        """Returns when every node is ready, and a cluster has its leader."""
        for number in range(self.count):
            self.nodes.append(self._node(number))
            guard(self.nodes[number].url)
        for number in range(self.count):
            await self.wait_until_ready(number)

    async def close(self) -> None:
        for node in self.nodes:
            node.kill()
        if self._small:
            self._unmount()

    def _unmount(self) -> None:
        for number in range(self.count):
            subprocess.run(["umount", self.disk(number)], check=True)

    def disk(self, number: int) -> Path:
        """Where a node keeps its streams."""
        return self._home / f"nats-{number}" / "disk"

    def forget_accounts(self, number: int) -> None:
        """A node that is down loses what it was told of accounts."""
        shutil.rmtree(self._resolver_directory(number))

    def _resolver_directory(self, number: int) -> Path:
        return self.disk(number) / "accounts"

    def violations(self) -> dict[str, list[str]]:
        """Violations of users, as each node has logged them."""
        names = [f"nats-{number}" for number in range(self.count)]
        return {name: find_violations(self._home / name / "server.log") for name in names}

    def urls(self, service: str) -> str:
        """Where a service finds the brokers: over wires of its own if it may be parted."""
        if not self._linked:
            return self.direct
        if service not in self._ends:
            self._ends.append(service)
        end = self._ends.index(service)
        wires = (network_partition.wire_address(end, number) for number in range(self.count))
        return ",".join(f"nats://{w}:{port}" for w, port in zip(wires, self.ports, strict=True))

    @property
    def direct(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self.ports)

    async def wait_until_ready(self, number: int) -> None:
        """Wait until a node has caught up and may serve."""
        await eventually(lambda: self._is_healthy(number), READY_SECONDS)

    def cut_network(self, whom: str) -> None:
        """Nothing passes between a service and the brokers, or a node and everybody else."""
        network_partition.cut(self._around(whom))

    def mend_network(self, whom: str) -> None:
        network_partition.mend(self._around(whom))

    def _around(self, whom: str) -> Iterator[str]:
        one = self._ends.index(whom)
        for end, other in itertools.product(range(len(self._ends)), range(self.count)):
            if end != other and one in (end, other):
                yield network_partition.wire_address(end, other)

    async def _is_healthy(self, number: int) -> bool:
        answer = await health_probe.send_probe(
            "127.0.0.1", self._monitors[number], "/healthz", ASK_SECONDS
        )
        return answer is not None and answer.is_healthy

    def _node(self, number: int) -> NatsServer:
        disk = self.disk(number)
        disk.mkdir(parents=True)
        if self._small:
            size = f"size={DISK_MIB}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "chaos", disk], check=True)
        options = [f"--http_port={self._monitors[number]}"]
        if self._linked:
            options.append("-a=0.0.0.0")  # at its end of each wire
        if self.count > 1:
            options += self._cluster_options(number)
        told = {"NATS_PORT": str(self.ports[number]), "NATS_STORE_DIR": str(disk)}
        return NatsServer(
            disk.parent,
            self.ports[number],
            self._configuration(number),
            options,
            {**os.environ, **told},
        )

    def _configuration(self, number: int) -> Path:
        """A node's, as shipped; ports are in the command line."""
        names, accounts = [f"nats-{n}" for n in range(self.count)], observed_accounts(self._cell)
        if self.count == 1:
            text = embedded_configuration(accounts, self._resolver_directory(number))
        else:
            text = node_configuration(accounts, names[number], names, str(self.disk(number)))
        return self._cell.write_node(names[number], text)

    def _cluster_options(self, number: int) -> list[str]:
        others = [other for other in range(self.count) if other != number]
        user = f"{ROUTES_USER}:{self._cell.routes_password()}"
        routes = ",".join(f"nats://{user}@{self._route(number, other)}" for other in others)
        host = "0.0.0.0" if self._linked else "127.0.0.1"
        options = [
            f"--cluster=nats://{user}@{host}:{self._cluster_ports[number]}",
            f"--routes={routes}",
        ]
        if self._linked:  # nobody may learn of a way around the wires
            options += ["--no_advertise=true", "--cluster_advertise=127.0.0.1:1"]
        return options

    def _route(self, number: int, other: int) -> str:
        host = network_partition.wire_address(number, other) if self._linked else "127.0.0.1"
        return f"{host}:{self._cluster_ports[other]}"

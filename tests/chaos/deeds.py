"""What can be done to a process, or to a client that reads, and undone."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from streams import subjects, topology
from streams.connection import connect
from tests.broker import NatsServer
from tests.chaos.brokers import DISK_MIB
from tests.chaos.cluster import Cluster
from tests.integration.processes import Service

Deed = Callable[[Cluster, str], Awaitable[None]]
MIB = 2**20
BOUND_BYTES = 64  # not even one request
SQUEEZED_BYTES = 256 * 1024  # the last seconds of what workers say
BALLAST = "ballast"
HOUR = 3600


def _process(cluster: Cluster, name: str) -> NatsServer | Service:
    kind, _, number = name.partition("-")
    return cluster.brokers.nodes[int(number)] if kind == "nats" else cluster.services[name]


async def kill(cluster: Cluster, name: str) -> None:
    _process(cluster, name).kill()


async def reap(cluster: Cluster, name: str) -> None:
    """A worker is killed, and its supervisor sees it (`millstream/up/supervisor.py`)."""
    await kill(cluster, name)
    async with connect(cluster.brokers.direct, "supervisor") as broker:
        await broker.publish(subjects.GONE, name.encode())


async def fail(cluster: Cluster, name: str) -> None:
    """A worker's engine fails in its next step, and being the only one ends the process."""
    cluster.services[name].process.send_signal(signal.SIGUSR1)


async def start(cluster: Cluster, name: str) -> None:
    """What was killed, as a supervisor would."""
    process = _process(cluster, name)
    if isinstance(process, NatsServer):
        await asyncio.to_thread(process.start)
    else:
        await cluster.start_service(name)


async def freeze(cluster: Cluster, name: str) -> None:
    _process(cluster, name).freeze()


async def thaw(cluster: Cluster, name: str) -> None:
    _process(cluster, name).thaw()


async def restart(cluster: Cluster, name: str) -> None:
    """As an operator does it: SIGTERM, wait, start, wait until it serves."""
    process = _process(cluster, name)
    if isinstance(process, NatsServer):
        process.process.terminate()
        await asyncio.to_thread(process.process.wait)
        await asyncio.to_thread(process.start)
        await cluster.brokers.ready(int(name.removeprefix("nats-")))
    else:
        await cluster.stop_service(name)
        await cluster.start_service(name)
        await cluster.ready(name)


async def part(cluster: Cluster, name: str) -> None:
    cluster.brokers.part(name)


async def join(cluster: Cluster, name: str) -> None:
    cluster.brokers.join(name)


async def fill(cluster: Cluster, name: str) -> None:
    """Somebody else fills the disk of the first broker to its last byte."""
    with _ballast(cluster).open("wb") as ballast:
        try:
            for _ in range(DISK_MIB):
                ballast.write(bytes(MIB))
                ballast.flush()
        except OSError:
            return
    raise AssertionError(f"the disk holds more than {DISK_MIB} MiB")


async def empty(cluster: Cluster, name: str) -> None:
    """There is room again. The broker has given up its streams: it says so at /healthz, and whoever
    supervises it starts it again, as `millstream up` does.
    """
    _ballast(cluster).unlink()
    await restart(cluster, name)


async def bound(cluster: Cluster, name: str) -> None:
    """A stream is full from now on."""
    await _bound(cluster, name, BOUND_BYTES)


async def squeeze(cluster: Cluster, name: str) -> None:
    """A stream drops its oldest messages from now on."""
    await _bound(cluster, name, SQUEEZED_BYTES)


async def unbound(cluster: Cluster, name: str) -> None:
    """As it was declared."""
    scale = topology.Scale(cluster.shape.nodes, cluster.shards)
    declared = topology.streams(scale, max_queued=1)
    await _bound(cluster, name, next(s.max_bytes or 0 for s in declared if s.name == name))


async def _bound(cluster: Cluster, stream: str, size: int) -> None:
    async with connect(cluster.brokers.direct, "chaos") as broker:
        config = (await broker.js.stream_info(stream)).config
        await broker.js.update_stream(config, max_bytes=size)


async def deafen(cluster: Cluster, name: str) -> None:
    cluster.readers[name].deafen()


async def dawdle(cluster: Cluster, name: str) -> None:
    cluster.readers[name].dawdle()


async def read(cluster: Cluster, name: str) -> None:
    cluster.readers[name].read()


async def ahead(cluster: Cluster, name: str) -> None:
    """A service's wall clock is set an hour forward."""
    cluster.clocks[name].set(HOUR)


async def behind(cluster: Cluster, name: str) -> None:
    """A service's wall clock is set an hour back."""
    cluster.clocks[name].set(-HOUR)


async def right(cluster: Cluster, name: str) -> None:
    """Its wall clock is set right."""
    cluster.clocks[name].set(0)


async def leave(cluster: Cluster, name: str) -> None:
    """There is nothing to undo."""


def _ballast(cluster: Cluster) -> Path:
    return cluster.brokers.disk(0) / BALLAST


DEEDS: dict[str, tuple[Deed, Deed]] = {
    "kill": (kill, start),
    "reap": (reap, start),
    "fail": (fail, start),
    "freeze": (freeze, thaw),
    "part": (part, join),
    "restart": (restart, leave),
    "fill": (fill, empty),
    "bound": (bound, unbound),
    "squeeze": (squeeze, unbound),
    "deafen": (deafen, read),
    "dawdle": (dawdle, read),
    "ahead": (ahead, right),
    "behind": (behind, right),
}

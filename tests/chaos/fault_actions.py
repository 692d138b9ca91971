"""What can be done to a process, or to a client that reads, and undone."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from streams import subjects, topology
from tests.chaos.broker_cluster import DISK_MIB
from tests.chaos.cluster import Cluster
from tests.support.accounts_server import connect
from tests.support.nats_server import NatsServer
from tests.support.service_process import ServiceProcess

Action = Callable[[Cluster, str], Awaitable[None]]
MIB = 2**20
FULL_STREAM_BYTES = 64  # not even one request
SHRUNK_STREAM_BYTES = 256 * 1024  # the last seconds of what workers say
BALLAST = "ballast"
HOUR = 3600
HOLD_SECONDS = 0.2


def _process(cluster: Cluster, name: str) -> NatsServer | ServiceProcess:
    kind, _, number = name.partition("-")
    return cluster.brokers.nodes[int(number)] if kind == "nats" else cluster.services[name]


async def kill(cluster: Cluster, name: str) -> None:
    _process(cluster, name).kill()


async def kill_and_report(cluster: Cluster, name: str) -> None:
    """A worker is killed, and its supervisor sees it (`millstream/up/supervisor.py`)."""
    await kill(cluster, name)
    async with connect(cluster.brokers.direct, "supervisor") as broker:
        await broker.store(subjects.GONE, name.encode(), repeats=True)


async def fail_engine(cluster: Cluster, name: str) -> None:
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
        await cluster.brokers.wait_until_ready(int(name.removeprefix("nats-")))
    else:
        await cluster.stop_service(name)
        await cluster.start_service(name)
        await cluster.wait_until_ready(name)


async def cut_network(cluster: Cluster, name: str) -> None:
    cluster.brokers.cut_network(name)


async def mend_network(cluster: Cluster, name: str) -> None:
    cluster.brokers.mend_network(name)


async def fill_disk(cluster: Cluster, name: str) -> None:
    """Somebody else fills the disk of the first broker to its last byte."""
    with _ballast(cluster).open("wb") as ballast:
        try:
            for _ in range(DISK_MIB):
                ballast.write(bytes(MIB))
                ballast.flush()
        except OSError:
            return
    raise AssertionError(f"the disk holds more than {DISK_MIB} MiB")


async def free_disk(cluster: Cluster, name: str) -> None:
    """There is room again. The broker has given up its streams: it says so at /healthz, and whoever
    supervises it starts it again, as `millstream up` does.
    """
    _ballast(cluster).unlink()
    await restart(cluster, name)


async def fill_stream(cluster: Cluster, name: str) -> None:
    """A stream is full from now on."""
    await _hold_stream_limit(cluster, name, FULL_STREAM_BYTES)


async def shrink_stream(cluster: Cluster, name: str) -> None:
    """A stream drops its oldest messages from now on."""
    await _hold_stream_limit(cluster, name, SHRUNK_STREAM_BYTES)


async def delete_stream(cluster: Cluster, name: str) -> None:
    """An operator deletes a stream."""
    async with connect(cluster.brokers.direct, "chaos") as broker:
        await broker.js.delete_stream(name)


async def wipe(cluster: Cluster, name: str) -> None:
    """A broker dies with its disk."""
    process = _process(cluster, name)
    assert isinstance(process, NatsServer)
    process.wipe()


async def _hold_stream_limit(cluster: Cluster, name: str, size: int) -> None:
    """Set a limit, and again whenever a gateway has mended it, until it is restored."""
    await _set_stream_limit(cluster, name, size)

    async def hold() -> None:
        while True:
            await asyncio.sleep(HOLD_SECONDS)
            await _set_stream_limit(cluster, name, size)

    cluster.held_limits[name] = asyncio.create_task(hold(), name=f"limit-{name}")


async def restore_stream_limit(cluster: Cluster, name: str) -> None:
    """As it was declared."""
    holding = cluster.held_limits.pop(name)
    holding.cancel()
    await asyncio.wait([holding])
    scale = topology.Scale(cluster.shape.nodes, cluster.shards)
    declared = topology.stream_configs(scale, max_queued=1)
    await _set_stream_limit(
        cluster, name, next(s.max_bytes or 0 for s in declared if s.name == name)
    )


async def _set_stream_limit(cluster: Cluster, stream: str, size: int) -> None:
    async with connect(cluster.brokers.direct, "chaos") as broker:
        config = (await broker.js.stream_info(stream)).config
        await broker.js.update_stream(config, max_bytes=size)


async def stop_reading(cluster: Cluster, name: str) -> None:
    cluster.readers[name].stop_reading()


async def read_slowly(cluster: Cluster, name: str) -> None:
    cluster.readers[name].read_slowly()


async def read_normally(cluster: Cluster, name: str) -> None:
    cluster.readers[name].read_normally()


async def set_clock_ahead(cluster: Cluster, name: str) -> None:
    """A service's wall clock is set an hour forward."""
    cluster.clocks[name].set(HOUR)


async def set_clock_back(cluster: Cluster, name: str) -> None:
    """A service's wall clock is set an hour back."""
    cluster.clocks[name].set(-HOUR)


async def set_clock_right(cluster: Cluster, name: str) -> None:
    """Its wall clock is set right."""
    cluster.clocks[name].set(0)


async def undo_nothing(cluster: Cluster, name: str) -> None:
    """There is nothing to undo."""


def _ballast(cluster: Cluster) -> Path:
    return cluster.brokers.disk(0) / BALLAST


ACTIONS: dict[str, tuple[Action, Action]] = {
    "kill": (kill, start),
    "reap": (kill_and_report, start),
    "fail": (fail_engine, start),
    "freeze": (freeze, thaw),
    "part": (cut_network, mend_network),
    "restart": (restart, undo_nothing),
    "fill": (fill_disk, free_disk),
    "bound": (fill_stream, restore_stream_limit),
    "squeeze": (shrink_stream, restore_stream_limit),
    "delete": (delete_stream, undo_nothing),
    "wipe": (wipe, start),
    "deafen": (stop_reading, read_normally),
    "dawdle": (read_slowly, read_normally),
    "ahead": (set_clock_ahead, set_clock_right),
    "behind": (set_clock_back, set_clock_right),
}

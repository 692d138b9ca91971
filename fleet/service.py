"""`millstream fleet`: leads the fleet, or stands by."""

import asyncio
from contextlib import AsyncExitStack

import nats.errors
import structlog

from fleet.metrics import LEADING
from fleet.plan_keeper import PlanKeeper
from fleet.settings import FleetSettings
from fleet.signal_collector import SignalCollector
from registry.store import Registry
from streams import topology
from streams.broker.broker_client import Broker, StoreRefused, connect
from streams.broker.clock_sync import sync_clock
from streams.broker.declaration import WAIT_SECONDS
from streams.broker.stream_monitor import StreamMonitor
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import LeaseBucket
from streams.errors import MillstreamError
from streams.metrics_server import not_yet, serve_metrics

log = structlog.get_logger()

LEASE = "fleet"
PAUSE_SECONDS = 1.0  # before this process leads again after an error of the broker


async def run(settings: FleetSettings, stop: asyncio.Event) -> None:
    """Lead or stand by until `stop` is set; then release the lease, so that another leads at once.

    Raises `BrokerUnavailable` if the broker does not answer at the start, and `TopologyMismatch`,
    in an exception group, if it refuses the bucket of the leases.
    """
    checks = {"nats": not_yet, "running": not_yet}
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_metrics(settings, checks))
        name = f"fleet-{settings.id}"
        broker = await stack.enter_async_context(connect(settings.nats, name, settings.nats_files))
        checks["nats"] = lambda: broker.is_connected
        registry = await Registry.open(broker, seconds=WAIT_SECONDS)
        stack.push_async_callback(registry.close)
        streams = StreamMonitor(broker)
        await streams.open([topology.LEDGER])
        await sync_clock(broker)
        lease = Lease(broker, LEASE, settings.id, LeaseBucket(broker))
        stack.push_async_callback(lease.release)
        LEADING.set_function(lambda: float(lease.is_held))
        async with asyncio.TaskGroup() as tasks:
            working = [
                tasks.create_task(lease.run(), name="lease"),
                tasks.create_task(_run(broker, registry, streams, lease, settings), name="fleet"),
            ]
            checks["running"] = lambda: not stop.is_set()
            log.info("fleet_running", id=settings.id)
            await stop.wait()
            for task in working:
                task.cancel()


async def _run(
    broker: Broker,
    registry: Registry,
    streams: StreamMonitor,
    lease: Lease,
    settings: FleetSettings,
) -> None:
    """Lead whenever this process holds the lease, until cancelled."""
    while True:
        await lease.gained.wait()
        collector = SignalCollector(broker, registry, streams, settings.signal_window_seconds)
        await lease.run_while_held(_lead(collector, PlanKeeper(broker, registry, collector)))


async def _lead(collector: SignalCollector, keeper: PlanKeeper) -> None:
    """Collect signals and keep the plan until cancelled.

    Returns after `PAUSE_SECONDS` if the broker interrupts.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(collector.run(), name="signals")
            tasks.create_task(keeper.run(), name="plan")
    except* (MillstreamError, StoreRefused, nats.errors.Error) as group:
        log.warning("fleet_interrupted", reason="; ".join(map(str, group.exceptions)))
    except* Exception:
        log.exception("fleet_broke")
    await asyncio.sleep(PAUSE_SECONDS)

"""`millstream dispatcher`: for each registered model, lead it or stand by."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import nats.errors
import structlog
from prometheus_client import start_http_server

from dispatcher.leader import Leader
from dispatcher.settings import DispatcherSettings
from registry.store import Registry
from registry.tenants import Tenants
from streams import lanes, topology
from streams.connection import Broker, StoreRefused, connect
from streams.errors import BrokerUnavailable
from streams.lease import Lease

log = structlog.get_logger()
_RETRY_SECONDS = 0.25


async def run(settings: DispatcherSettings, stop: asyncio.Event) -> None:
    """Dispatch until `stop`; then leases are given up, so that standbys go on at once."""
    if settings.metrics_port:
        start_http_server(settings.metrics_port)
    async with AsyncExitStack() as stack:
        name = f"dispatcher-{settings.id}"
        broker = await stack.enter_async_context(connect(settings.nats, name))
        registry = await Registry.open(broker, replicas=settings.replicas)
        stack.push_async_callback(registry.close)
        tenants = await Tenants.open(broker, replicas=settings.replicas)
        stack.push_async_callback(tenants.close)
        await topology.wait_for(broker.js, topology.REQUESTS)
        async with asyncio.TaskGroup() as tasks:
            models = tasks.create_task(_follow(broker, registry, tenants, settings), name="models")
            await stop.wait()
            models.cancel()


async def _follow(
    broker: Broker, registry: Registry, tenants: Tenants, settings: DispatcherSettings
) -> None:
    """One candidate per model, as models come.

    They stay when a model goes: what was queued for it must still be ended.
    """
    changed = asyncio.Event()
    registry.on_change(changed.set)
    standing: set[str] = set()
    forgotten = await lanes.models(broker)
    async with asyncio.TaskGroup() as tasks:
        while True:
            changed.clear()
            for model in (registry.models.keys() | forgotten) - standing:
                make = partial(Leader, broker, registry, tenants, model, settings.shards)
                tasks.create_task(_stand(_lease(broker, model, settings), make), name=model)
                standing.add(model)
            await changed.wait()


def _lease(broker: Broker, model: str, settings: DispatcherSettings) -> Lease:
    scale = topology.Scale(settings.replicas, settings.shards)
    return Lease(broker, f"dispatcher.{model}", settings.id, settings.lease_seconds, scale)


async def _stand(lease: Lease, make: Callable[[], Leader]) -> None:
    """Lead whenever the lease is ours, each time with a new leader that knows nothing yet."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lease.run(), name="lease")
            while True:
                await lease.gained.wait()
                await _lead(lease, make())
    finally:
        await lease.release()


async def _lead(lease: Lease, leader: Leader) -> None:
    """Lead until the lease is lost; a leader that the broker interrupted is made anew."""
    leading = asyncio.create_task(leader.run(), name="leader")
    losing = asyncio.create_task(lease.lost(), name="lost")
    try:
        await asyncio.wait({leading, losing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        losing.cancel()
        leading.cancel()
        await asyncio.wait({leading})
    if not leading.cancelled() and (error := leading.exception()):
        if not _interrupted(error):
            raise error
        log.warning("leader_interrupted", model=leader.model, reason=repr(error))
        await asyncio.sleep(_RETRY_SECONDS)


def _interrupted(error: BaseException) -> bool:
    """True for what passes when the broker is back."""
    if isinstance(error, BaseExceptionGroup):
        return all(_interrupted(each) for each in error.exceptions)
    passing = (BrokerUnavailable, StoreRefused, nats.errors.Error, TimeoutError)
    return isinstance(error, passing)

"""`millstream gateway`: the door, from its first connection to its last drained request."""

import asyncio
import socket
from contextlib import AsyncExitStack
from functools import partial

import structlog

from gateway.admission import Deadlines
from gateway.app import app
from gateway.door import Door
from gateway.grammars import Grammars
from gateway.ingress import Ingress
from gateway.intake import Intake
from gateway.preparation import Preparation
from gateway.relay import Relay
from gateway.server import Server, config, listen
from gateway.settings import GatewaySettings
from gateway.tokenizer import Tokenizers
from registry.store import Registry
from registry.tenants import Tenants
from streams import declaration
from streams.connection import Broker, connect
from streams.errors import Ended, MillstreamError
from streams.patience import persistently
from streams.settings import TenantSettings
from streams.timekeeping import set_clock
from streams.topology import Scale

log = structlog.get_logger()


async def run(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until `stop`; then finish what is under way and take nothing new."""
    listener = listen(settings)
    scale = Scale(settings.replicas, settings.shards)
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        broker = await stack.enter_async_context(connect(settings.nats, f"gateway-{settings.id}"))
        registry = await Registry.open(broker, replicas=settings.replicas)
        stack.push_async_callback(registry.close)
        tenants = await Tenants.open(broker, replicas=settings.replicas)
        stack.push_async_callback(tenants.close)
        await _declare(tenants, settings)
        door = await _open(stack, settings, broker, registry, tenants)
        await _reconcile(door, scale)
        await set_clock(broker)
        await _serve(door, scale, listener, stop)


async def _declare(tenants: Tenants, settings: GatewaySettings) -> None:
    """Only what this gateway was given: others may have been given the rest.

    An empty table `[tenants]` removes all that came from a configuration.
    """
    if "tenants" in settings.model_fields_set:
        await tenants.declare(settings.tenants)
    if settings.api_key:
        await tenants.declare_key(settings.api_key)


async def _open(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    broker: Broker,
    registry: Registry,
    tenants: Tenants,
) -> Door:
    relay = Relay(broker, f"gw-{settings.id}", settings.shards, settings.grace_seconds)
    await relay.open()
    tokenizers = Tokenizers()
    stack.callback(tokenizers.close)
    grammars = Grammars()
    stack.callback(grammars.close)
    deadlines = Deadlines(settings.default_deadline_seconds, settings.max_deadline_seconds)
    preparation = Preparation(broker, registry, tokenizers, grammars, deadlines)
    intake = Intake(broker, preparation, relay)
    await intake.open(settings.replicas)
    door = Door(settings, broker, registry, tenants, tokenizers, intake, relay)
    stack.callback(door.porter.close)
    return door


async def _reconcile(door: Door, scale: Scale) -> None:
    """Declare the streams, every lane bounded by the highest limit of any tenant."""
    limits = [tenant.max_queued for tenant in door.tenants.by_name.values()]
    most = max(limits, default=TenantSettings().max_queued)
    door.intake.max_queued = await declaration.declare(door.broker, scale, most)


async def _serve(door: Door, scale: Scale, listener: socket.socket, stop: asyncio.Event) -> None:
    server = Server(config(app(door), door.settings))
    async with asyncio.TaskGroup() as tasks:
        relaying = tasks.create_task(door.relay.run(), name="relay")
        counting = tasks.create_task(door.intake.quotas.run(), name="quotas")
        following = tasks.create_task(_follow_tenants(door, scale), name="tenants")
        warming = tasks.create_task(_warm(door), name="tokenizers")
        serving = tasks.create_task(server.serve([listener]), name="http")
        host, port = listener.getsockname()[:2]
        log.info("listening", host=host, port=port, route=door.relay.route)
        await stop.wait()
        door.draining.set()
        for task in (following, warming):
            task.cancel()
        await _drained(door)
        for reader in door.readers:
            reader.close(Ended("overloaded", "this gateway is shutting down; ask another one"))
        server.should_exit = True
        await serving
        for task in (relaying, counting):
            task.cancel()
        await door.relay.close()


async def _drained(door: Door) -> None:
    """Wait until nobody waits for an answer, at most as long as the process may drain.

    Requests whose clients have left, or leave then, can be resumed at another gateway.
    """
    deadline = asyncio.get_running_loop().time() + 0.9 * door.settings.drain_seconds
    while door.relay.readers and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


async def _follow_tenants(door: Door, scale: Scale) -> None:
    """An ingress for each tenant, as tenants come and go; lanes bounded as their limits change.

    A broker that restarts has lost the streams that it kept in memory: they are declared again.
    """
    changed = asyncio.Event()
    door.tenants.on_change(changed.set)
    door.broker.on_reconnect.append(changed.set)
    ingresses: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            changed.clear()
            await persistently(partial(_reconcile, door, scale))
            names = {name for name, tenant in door.tenants.by_name.items() if tenant.publishes}
            for name in names - ingresses.keys():
                ingress = Ingress(door, name, scale)
                ingresses[name] = tasks.create_task(ingress.run(), name=f"ingress-{name}")
            for name in ingresses.keys() - names:
                ingresses.pop(name).cancel()
            await changed.wait()


async def _warm(door: Door) -> None:
    """Load tokenisers before requests come: the first one would wait for a second or more."""
    changed = asyncio.Event()
    door.registry.on_change(changed.set)
    while True:
        changed.clear()
        for model in list(door.registry.models.values()):
            try:
                await door.tokenizers.warm(model, model.default)
            except MillstreamError as error:
                log.error("tokenizer_unusable", model=model.name, reason=str(error))
        await changed.wait()

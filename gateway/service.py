"""`millstream gateway`: the door, from its first connection to its last drained request."""

import asyncio
import socket
from contextlib import AsyncExitStack
from functools import partial

import structlog

from api.grammar_checker import GrammarChecker
from api.submission.request_limits import DeadlineLimits
from api.submission.validation import SubmissionValidator
from api.tokenizer import TokenizerCache
from gateway.admission.submitter import Submitter
from gateway.context import GatewayContext
from gateway.entrypoints.nats_ingress import NatsIngress
from gateway.entrypoints.routes import build_app
from gateway.replies.relay import Relay
from gateway.server.uvicorn_server import GatewayServer, build_config, listen
from gateway.settings import GatewaySettings
from registry.store import Registry
from registry.tenants import Tenants
from streams.broker import declaration
from streams.broker.clock_sync import sync_clock
from streams.broker.connection import Broker, connect
from streams.broker.retry import retry_forever
from streams.errors import Ended, MillstreamError
from streams.settings import TenantSettings
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
        await _declare_tenants(tenants, settings)
        door = await _build_context(stack, settings, broker, registry, tenants)
        await _declare_streams(door, scale)
        await sync_clock(broker)
        await _serve(door, scale, listener, stop)


async def _declare_tenants(tenants: Tenants, settings: GatewaySettings) -> None:
    """Only what this gateway was given: others may have been given the rest.

    An empty table `[tenants]` removes all that came from a configuration.
    """
    if "tenants" in settings.model_fields_set:
        await tenants.apply_config(settings.tenants)
    if settings.api_key:
        await tenants.apply_api_key(settings.api_key)


async def _build_context(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    broker: Broker,
    registry: Registry,
    tenants: Tenants,
) -> GatewayContext:
    relay = Relay(broker, f"gw-{settings.id}", settings.shards, settings.grace_seconds)
    await relay.open()
    tokenizers = TokenizerCache()
    stack.callback(tokenizers.close)
    grammars = GrammarChecker()
    stack.callback(grammars.close)
    deadlines = DeadlineLimits(settings.default_deadline_seconds, settings.max_deadline_seconds)
    preparation = SubmissionValidator(broker, registry, tokenizers, grammars, deadlines)
    intake = Submitter(broker, preparation, relay)
    await intake.open(settings.replicas)
    door = GatewayContext(settings, broker, registry, tenants, tokenizers, intake, relay)
    stack.callback(door.offload_thread.close)
    return door


async def _declare_streams(door: GatewayContext, scale: Scale) -> None:
    """Declare the streams, every lane bounded by the highest limit of any tenant."""
    limits = [tenant.max_queued for tenant in door.tenants.by_name.values()]
    most = max(limits, default=TenantSettings().max_queued)
    door.submitter.max_queued = await declaration.declare(door.broker, scale, most)


async def _serve(
    door: GatewayContext, scale: Scale, listener: socket.socket, stop: asyncio.Event
) -> None:
    server = GatewayServer(build_config(build_app(door), door.settings))
    async with asyncio.TaskGroup() as tasks:
        relaying = tasks.create_task(door.relay.run(), name="relay")
        counting = tasks.create_task(door.submitter.quotas.run(), name="quotas")
        following = tasks.create_task(_follow_tenants(door, scale), name="tenants")
        warming = tasks.create_task(_warm_tokenizers(door), name="tokenizers")
        serving = tasks.create_task(server.serve([listener]), name="http")
        host, port = listener.getsockname()[:2]
        log.info("listening", host=host, port=port, route=door.relay.route)
        await stop.wait()
        door.draining.set()
        for task in (following, warming):
            task.cancel()
        await _wait_until_drained(door)
        for reader in door.record_queues:
            reader.close(Ended("overloaded", "this gateway is shutting down; ask another one"))
        server.should_exit = True
        await serving
        for task in (relaying, counting):
            task.cancel()
        await door.relay.close()


async def _wait_until_drained(door: GatewayContext) -> None:
    """Wait until nobody waits for an answer, at most as long as the process may drain.

    Requests whose clients have left, or leave then, can be resumed at another gateway.
    """
    deadline = asyncio.get_running_loop().time() + 0.9 * door.settings.drain_seconds
    while door.relay.reader_count and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


async def _follow_tenants(door: GatewayContext, scale: Scale) -> None:
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
            await retry_forever(partial(_declare_streams, door, scale))
            names = {name for name, tenant in door.tenants.by_name.items() if tenant.publishes}
            for name in names - ingresses.keys():
                ingress = NatsIngress(door, name, scale)
                ingresses[name] = tasks.create_task(ingress.run(), name=f"ingress-{name}")
            for name in ingresses.keys() - names:
                ingresses.pop(name).cancel()
            await changed.wait()


async def _warm_tokenizers(door: GatewayContext) -> None:
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

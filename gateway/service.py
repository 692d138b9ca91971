"""`millstream gateway`: builds a gateway's parts, runs them, and drains its requests at the end."""

import asyncio
import socket
from contextlib import AsyncExitStack
from functools import partial

import structlog
from nats.js.api import StreamConfig

from api.grammar_checker import GrammarChecker
from api.submission.request_limits import DeadlineLimits
from api.submission.validation import SubmissionValidator
from api.tokenizer import TokenizerCache
from gateway.admission import idempotency
from gateway.admission.client_requests import ClientRequests
from gateway.admission.offload_thread import OffloadThread
from gateway.admission.producer_requests import ProducerRequests
from gateway.admission.submitter import Submitter
from gateway.context import GatewayContext
from gateway.entrypoints.nats_ingress import NatsIngress, remove_unused_streams
from gateway.entrypoints.routes import build_app
from gateway.metrics import observe_unusable
from gateway.replies.relay import Relay
from gateway.replies.stored_records import StoredRecords
from gateway.server.tls_certificate import ServerCertificate, TlsFiles
from gateway.server.uvicorn_server import GatewayServer, build_config, listen
from gateway.settings import GatewaySettings
from registry.store import Registry
from registry.tenants import Tenants
from streams import topology
from streams.base_settings import TenantSettings
from streams.broker.broker_client import Broker, connect
from streams.broker.clock_sync import sync_clock
from streams.broker.stream_reconciler import StreamReconciler
from streams.errors import BrokerMisconfigured, BrokerUnavailable, Ended, MillstreamError
from streams.metrics_server import serve_metrics
from streams.topology import Scale

log = structlog.get_logger()


async def run(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve clients until `stop` is set; then take no new requests and finish those under way.

    Those that are not finished when the time to drain is nearly over can be resumed at another
    gateway. Raises `AddressInUse` if the address cannot be bound, `CertificateUnusable` if
    TLS cannot be served with the files given, and `BrokerUnavailable` if the broker does not answer
    at the start.
    """
    tls_files = TlsFiles.from_settings(settings)
    certificate = ServerCertificate(tls_files) if tls_files else None
    listener = listen(settings)
    scale = Scale(settings.replicas, settings.shards)
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        broker = await stack.enter_async_context(
            connect(settings.nats, f"gateway-{settings.id}", settings.nats_files)
        )
        registry = await Registry.open(broker, replicas=settings.replicas, restores=True)
        stack.push_async_callback(registry.close)
        tenants = await Tenants.open(broker, replicas=settings.replicas, restores=True)
        stack.push_async_callback(tenants.close)
        await _declare_tenants(tenants, settings)
        streams = StreamReconciler(broker, scale, partial(_stream_configs, tenants, scale))
        await streams.declare_all()
        context = await _build_context(stack, settings, broker, registry, tenants, streams)
        checks = context.readiness_checks
        stack.enter_context(serve_metrics(settings, checks, context.refresh_metrics))
        await sync_clock(broker)
        server = GatewayServer(build_config(build_app(context), settings), certificate)
        await _serve(context, scale, server, listener, stop)


async def _declare_tenants(tenants: Tenants, settings: GatewaySettings) -> None:
    """Store the tenants of this gateway's settings; other gateways may have other ones.

    An empty table `[tenants]` removes all tenants that came from a configuration.
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
    streams: StreamReconciler,
) -> GatewayContext:
    relay = Relay(broker, f"gw-{settings.id}", settings.shards, settings.grace_seconds)
    await relay.open()
    await StoredRecords(broker, settings.shards).open()
    tokenizers = TokenizerCache()
    stack.callback(tokenizers.close)
    grammars = GrammarChecker()
    stack.callback(grammars.close)
    deadlines = DeadlineLimits(settings.default_deadline_seconds, settings.max_deadline_seconds)
    validator = SubmissionValidator(broker, registry, tokenizers, grammars, deadlines)
    offload_thread = OffloadThread()
    stack.callback(offload_thread.close)
    submitter = Submitter(broker, streams, offload_thread)
    await submitter.open(settings.replicas)
    context = GatewayContext(
        settings,
        broker,
        registry,
        tenants,
        tokenizers,
        validator,
        submitter,
        ClientRequests(submitter, relay),
        ProducerRequests(broker, submitter, settings.shards),
        relay,
        streams,
        offload_thread,
    )
    tenants.on_change(context.check_keys)
    streams.on_change = partial(_handle_unusable_streams, context)
    streams.on_deleted = partial(_check_bucket, context)
    streams.on_replaced = partial(_doubt_requests, context)
    return context


def _stream_configs(tenants: Tenants, scale: Scale) -> list[StreamConfig]:
    """Return what to declare, with every lane bounded by the highest limit of any tenant."""
    limits = [tenant.max_queued for tenant in tenants.by_name.values()]
    most = max(limits, default=TenantSettings().max_queued)
    return [*topology.stream_configs(scale, most), idempotency.bucket_config()]


def _handle_unusable_streams(context: GatewayContext) -> None:
    """Export the streams that cannot be used, and end the requests whose logs are in them."""
    observe_unusable(context.streams.unusable)
    for stream in context.streams.unusable:
        context.relay.fail_stream(stream)


def _check_bucket(context: GatewayContext, stream: str) -> None:
    """Have a bucket restored whose stream was deleted."""
    for view in (context.registry, context.tenants):
        view.check_bucket(stream)


def _doubt_requests(context: GatewayContext, stream: str) -> None:
    """Look for the requests that were queued or in flight in a stream that is another one now."""
    if stream in (topology.REQUESTS, topology.WORK):
        context.relay.doubt_unstarted()


async def _serve(
    context: GatewayContext,
    scale: Scale,
    server: GatewayServer,
    listener: socket.socket,
    stop: asyncio.Event,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        relaying = tasks.create_task(context.relay.run(), name="relay")
        counting = tasks.create_task(context.submitter.quotas.run(), name="quotas")
        declaring = tasks.create_task(context.streams.run(), name="streams")
        tracking = tasks.create_task(_follow_tenants(context, scale), name="tenants")
        warming = tasks.create_task(_warm_tokenizers(context), name="tokenizers")
        serving = tasks.create_task(server.serve([listener]), name="http")
        host, port = listener.getsockname()[:2]
        tls = bool(context.settings.tls_cert)
        log.info("listening", host=host, port=port, tls=tls, route=context.relay.route)
        await stop.wait()
        context.draining.set()
        for task in (tracking, warming):
            task.cancel()
        await _wait_until_drained(context)
        for queue in context.record_queues:
            queue.close(Ended("overloaded", "this gateway is shutting down; ask another one"))
        server.should_exit = True
        await serving
        for task in (relaying, counting, declaring):
            task.cancel()
        await context.relay.close()


async def _wait_until_drained(context: GatewayContext) -> None:
    """Wait until no client waits for a response, for at most 0.9 of the time to drain.

    Requests whose clients have left, or leave meanwhile, can be resumed at another gateway.
    """
    deadline = asyncio.get_running_loop().time() + 0.9 * context.settings.drain_seconds
    while context.relay.reader_count and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


async def _follow_tenants(context: GatewayContext, scale: Scale) -> None:
    """Run an ingress for each tenant that publishes to NATS, and bound lanes by tenants' limits.

    Both are brought up to date whenever tenants change. At the start, and when a tenant publishes
    no more, the streams of those that do not are removed.
    """
    changed = asyncio.Event()
    context.tenants.on_change(changed.set)
    ingresses: dict[str, asyncio.Task[None]] = {}
    has_unused = True
    async with asyncio.TaskGroup() as tasks:
        while True:
            changed.clear()
            context.streams.wake()
            names = {name for name, tenant in context.tenants.by_name.items() if tenant.publishes}
            for name in names - ingresses.keys():
                ingress = NatsIngress(context, name, scale)
                ingresses[name] = tasks.create_task(ingress.run(), name=f"ingress-{name}")
            for name in ingresses.keys() - names:
                ingresses.pop(name).cancel()
                has_unused = True
            if has_unused:
                has_unused = not await _remove_unused_streams(context, names)
            await changed.wait()


async def _remove_unused_streams(context: GatewayContext, publishing: set[str]) -> bool:
    """Remove what tenants do not use; False if the broker did not let us, which harms nobody."""
    try:
        await remove_unused_streams(context.broker, publishing)
    except (BrokerUnavailable, BrokerMisconfigured) as error:
        log.warning("streams_not_removed", reason=str(error))
        return False
    return True


async def _warm_tokenizers(context: GatewayContext) -> None:
    """Load tokenisers before requests come: else a model's first one waits a second or more."""
    changed = asyncio.Event()
    context.registry.on_change(changed.set)
    while True:
        changed.clear()
        for model in list(context.registry.models.values()):
            try:
                await context.tokenizers.warm(model, model.default)
            except MillstreamError as error:
                log.error("tokenizer_unusable", model=model.name, reason=str(error))
        await changed.wait()

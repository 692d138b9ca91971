"""`millstream gateway`: builds a gateway's parts, runs them, and drains its requests at the end."""

import asyncio
import socket
from contextlib import AsyncExitStack
from functools import partial

import structlog

from api.authentication.authenticator import Authenticator
from api.authentication.identity_provider import open_providers
from api.grammar_checker import GrammarChecker
from api.submission.ledger_space import LedgerSpace
from api.submission.request_limits import DeadlineLimits
from api.submission.reservation_recovery import ReservationRecovery
from api.submission.response_space import ResponseSpace
from api.submission.validation import SubmissionValidator
from api.tokenizer import TokenizerCache
from gateway.admission.client_requests import ClientRequests
from gateway.admission.fleet_view import FleetView
from gateway.admission.offload_thread import OffloadThread
from gateway.admission.preparation_meter import PreparationMeter
from gateway.admission.producer_requests import ProducerRequests
from gateway.admission.refusal_recorder import RefusalRecorder
from gateway.admission.submitter import Submitter
from gateway.beat_sender import GatewayBeatSender
from gateway.context import GatewayContext
from gateway.entrypoints.nats_ingress import NatsIngress
from gateway.entrypoints.nats_jobs import NatsJobs
from gateway.entrypoints.routes import build_app
from gateway.metrics import observe_unusable
from gateway.replies.relay import Relay
from gateway.replies.stored_records import StoredRecords
from gateway.server.tls_certificate import ServerCertificate, TlsFiles
from gateway.server.uvicorn_server import GatewayServer, build_config, listen
from gateway.settings import GatewaySettings
from registry.credentials.key_pepper import read_pepper
from registry.credentials.key_strength import MIN_BITS
from registry.credentials.keys import Keys
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenants import Tenants
from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, connect
from streams.broker.clock_sync import sync_clock
from streams.broker.declaration import WAIT_SECONDS
from streams.broker.stream_monitor import StreamMonitor
from streams.errors import BrokerUnavailable, Ended, MillstreamError, Overloaded
from streams.metrics_server import serve_metrics
from streams.records.files.chunk_cache import ChunkCache
from streams.records.files.file_store import FileStore
from streams.records.jobs.batch_store import BatchStore
from streams.records.key_use import add_uses
from streams.records.responses.response_store import ResponseStore
from streams.records.usage_rollups import UsageRollups
from streams.records.webhooks.delivery_store import DeliveryStore
from streams.records.webhooks.endpoint_store import EndpointStore

log = structlog.get_logger()
LINE_CACHE_BYTES = 8 * 2**20  # of inputs and indexes of batches, for reads of single lines

KEY_USE_SECONDS = 60.0


class WeakKeys(MillstreamError):
    """API keys that could be guessed would open a gateway that strangers can reach."""

    def __init__(self, host: str, keys: list[tuple[str, str]]) -> None:
        shown = ", ".join(f"{name!r} of tenant {tenant!r}" for tenant, name in keys[:5])
        super().__init__(
            f"these API keys are shorter than {MIN_BITS} bits or are examples: {shown}. A gateway "
            f"on {host}, which others can reach, does not start with them: give keys like that of "
            "`openssl rand -hex 24`, or --host 127.0.0.1"
        )
        self.host, self.keys = host, keys


async def run(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve clients until `stop` is set; then take no new requests and finish those under way.

    Those that are not finished when the time to drain is nearly over can be resumed at another
    gateway. Raises `WeakKeys`, `PepperUnreadable`, `AddressInUse` if the address cannot be bound,
    `DescriptorUnusable` for an inherited socket that is none, `CertificateUnusable` if TLS cannot
    be served with the files given, and `BrokerUnavailable` if the broker does not answer at the
    start.
    """
    tls_files = TlsFiles.from_settings(settings)
    certificate = ServerCertificate(tls_files) if tls_files else None
    listener = listen(settings)
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        broker = await stack.enter_async_context(
            connect(settings.nats, f"gateway-{settings.id}", settings.nats_files)
        )
        registry = await Registry.open(broker, seconds=WAIT_SECONDS)
        stack.push_async_callback(registry.close)
        tenants = await Tenants.open(broker, seconds=WAIT_SECONDS)
        stack.push_async_callback(tenants.close)
        keys = await Keys.open(broker, seconds=WAIT_SECONDS)
        stack.push_async_callback(keys.close)
        _refuse_weak_keys(tenants, settings)
        prices = await PriceBook.open(broker, seconds=WAIT_SECONDS)
        stack.push_async_callback(prices.close)
        streams = StreamMonitor(broker)
        await streams.open(topology.stream_names(settings.shards))
        authenticator = _build_authenticator(stack, settings, broker, tenants, keys)
        context = await _build_context(
            stack, settings, broker, registry, tenants, keys, authenticator, prices, streams
        )
        checks = context.readiness_checks
        stack.enter_context(serve_metrics(settings, checks, context.refresh_metrics))
        await sync_clock(broker)
        server = GatewayServer(build_config(build_app(context), settings), certificate)
        await _serve(context, server, listener, stop)


def _refuse_weak_keys(tenants: Tenants, settings: GatewaySettings) -> None:
    """Raise `WeakKeys` if strangers could reach this gateway with a key that can be guessed."""
    weak = [key for key in tenants.keys if key.is_weak]
    if weak and not settings.is_on_loopback:
        raise WeakKeys(settings.host, [(key.tenant, key.name) for key in weak])


def _build_authenticator(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    broker: Broker,
    tenants: Tenants,
    keys: Keys,
) -> Authenticator:
    pepper = read_pepper(settings.key_pepper_file) if settings.key_pepper_file else None
    return Authenticator(
        tenants,
        keys,
        pepper,
        open_providers(stack, settings.oidc),
        broker.clock.now,
        refuses_weak=not settings.is_on_loopback,
    )


async def _build_context(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    broker: Broker,
    registry: Registry,
    tenants: Tenants,
    keys: Keys,
    authenticator: Authenticator,
    prices: PriceBook,
    streams: StreamMonitor,
) -> GatewayContext:
    relay = Relay(broker, f"gw-{settings.id}", settings.shards, settings.grace_seconds)
    await relay.open()
    await StoredRecords(broker, settings.shards).open()
    tokenizers = TokenizerCache()
    stack.callback(tokenizers.close)
    grammars = GrammarChecker()
    stack.callback(grammars.close)
    deadlines = DeadlineLimits(settings.default_deadline_seconds, settings.max_deadline_seconds)
    validator = SubmissionValidator(broker, registry, prices, tokenizers, grammars, deadlines)
    offload_thread = OffloadThread()
    stack.callback(offload_thread.close)
    ledger_space = LedgerSpace(broker)
    await declaration.wait_for_stream(broker, topology.FLEET)
    fleet = FleetView(broker)
    await fleet.open()
    submitter = Submitter(broker, streams, offload_thread, ledger_space, fleet)
    await submitter.open()
    context = GatewayContext(
        settings,
        broker,
        registry,
        tenants,
        keys,
        authenticator,
        prices,
        tokenizers,
        validator,
        PreparationMeter(validator),
        submitter,
        ClientRequests(submitter, relay),
        ProducerRequests(broker, submitter, settings.shards),
        relay,
        streams,
        offload_thread,
        ledger_space,
        RefusalRecorder(broker, registry, settings.id, lambda: not ledger_space.use.is_full),
        UsageRollups(broker),
        FileStore(broker),
        FileStore(broker, ChunkCache(LINE_CACHE_BYTES)),
        BatchStore(broker),
        ResponseStore(broker),
        ResponseSpace(broker, BatchStore(broker)),
        EndpointStore(broker),
        DeliveryStore(broker),
        fleet,
    )
    for records in (tenants, keys):  # after the authenticator, which must have noticed the change
        records.on_change(context.principal_watches.check_all)
    streams.on_change = partial(_handle_unusable_streams, context)
    streams.on_replaced = partial(_doubt_requests, context)
    observe_unusable(streams.unusable)
    return context


def _handle_unusable_streams(context: GatewayContext) -> None:
    """Export the streams that cannot be used, and end the requests whose logs are in them."""
    observe_unusable(context.streams.unusable)
    for stream in context.streams.unusable:
        context.relay.fail_stream(stream)


def _doubt_requests(context: GatewayContext, stream: str) -> None:
    """Look for the requests that were queued or in flight in a stream that is another one now."""
    if stream in (topology.REQUESTS, topology.WORK):
        context.relay.doubt_unstarted()


async def _serve(
    context: GatewayContext,
    server: GatewayServer,
    listener: socket.socket,
    stop: asyncio.Event,
) -> None:
    jobs = NatsJobs(context)
    await jobs.open()
    async with asyncio.TaskGroup() as tasks:
        beats = GatewayBeatSender(context, lambda: len(server.server_state.connections))
        relaying = tasks.create_task(context.relay.run(), name="relay")
        counting = tasks.create_task(context.submitter.quotas.run(), name="quotas")
        tracking = tasks.create_task(_follow_tenants(context), name="tenants")
        warming = tasks.create_task(_warm_tokenizers(context), name="tokenizers")
        background = [
            tasks.create_task(beats.run(), name="beats"),
            tasks.create_task(context.ledger_space.run(), name="ledger"),
            tasks.create_task(context.fleet.run(), name="fleet"),
            tasks.create_task(context.response_space.run(), name="results"),
            tasks.create_task(context.refusals.run(), name="refusals"),
            tasks.create_task(context.rollups.run(), name="rollups"),
            tasks.create_task(ReservationRecovery(context.broker).run(), name="reservations"),
            tasks.create_task(_store_key_uses(context), name="key-uses"),
            tasks.create_task(jobs.run(), name="jobs"),
        ]
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
        for task in (relaying, counting, *background):
            task.cancel()
        await context.refusals.close()
        await context.relay.close()


async def _wait_until_drained(context: GatewayContext) -> None:
    """Wait until no client waits for a response, for at most 0.9 of the time to drain.

    Requests whose clients have left, or leave meanwhile, can be resumed at another gateway.
    """
    deadline = asyncio.get_running_loop().time() + 0.9 * context.settings.drain_seconds
    while context.relay.reader_count and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


async def _follow_tenants(context: GatewayContext) -> None:
    """Run an ingress for each tenant that publishes to NATS; kept up to date as tenants change."""
    changed = asyncio.Event()
    context.tenants.on_change(changed.set)
    ingresses: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            changed.clear()
            names = {name for name, tenant in context.tenants.by_name.items() if tenant.publishes}
            for name in names - ingresses.keys():
                ingress = NatsIngress(context, name)
                ingresses[name] = tasks.create_task(ingress.run(), name=f"ingress-{name}")
            for name in ingresses.keys() - names:
                ingresses.pop(name).cancel()
            await changed.wait()


async def _store_key_uses(context: GatewayContext) -> None:
    """Add up each minute which keys were used; uses that the broker did not count are let go."""
    while True:
        await asyncio.sleep(KEY_USE_SECONDS)
        for (tenant, key_id), uses in context.key_uses.take().items():
            try:
                await add_uses(context.broker, tenant, key_id, uses)
            except (BrokerUnavailable, Overloaded) as error:
                log.warning("key_use_not_stored", key=key_id, reason=str(error))


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

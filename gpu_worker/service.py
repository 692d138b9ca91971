"""The worker service (`millstream worker`): loads models, announces credit, serves, drains."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from nats.aio.msg import Msg

from gpu_worker.compute_meter import ComputeMeter, ModelMeter
from gpu_worker.compute_reporter import ComputeReporter
from gpu_worker.drain_controller import DrainController
from gpu_worker.identity import WorkerIdentity
from gpu_worker.metrics import ENGINE_STATS, forget_model, observe_finished, observe_heartbeat
from gpu_worker.models.loading import Loader
from gpu_worker.models.memory_plan import MemoryPlan
from gpu_worker.models.metrics import observe_models
from gpu_worker.models.model_eviction import EvictionPlanner
from gpu_worker.models.model_manager import ManagedModel, ModelManager
from gpu_worker.models.record_checks import check_model
from gpu_worker.models.registration import wait_for_models
from gpu_worker.models.served_models import ServedModelsFollower
from gpu_worker.pool.model_server import ModelServer
from gpu_worker.reclaim.notice_sources import make_source
from gpu_worker.reclaim_watch import ReclaimWatch
from gpu_worker.settings import WorkerSettings
from registry.models import Model, Version
from registry.store import Registry
from streams import messages, signals, subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, BrokerSubscription, connect
from streams.broker.clock_sync import sync_clock
from streams.broker.declaration import WAIT_SECONDS
from streams.coordination.signal_handler import SignalHandler
from streams.metrics_server import not_yet, serve_metrics
from streams.records.token_log_cache import RecordsQuery
from streams.signals import DrainReport

log = structlog.get_logger()

T = TypeVar("T")


async def run(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Run the worker service: load the configured models and serve them until drained.

    The drain (nothing new is accepted; requests are finished or left to other workers) begins when
    `stop` is set or an operator asks for it, and this returns when it is over. A drain that begins
    while models are still loading ends the service without waiting for them.

    Raises `NotRegistered` for models that are not registered in time, `ModelRefused` for one whose
    record decides more than the settings allow, `DoesNotFit` for one that is larger than the
    memory, and the error of a model that cannot be loaded at the start.
    Raises `EngineCrashed` or `EngineHung`, in an exception group, when a failed engine has to end
    the process.
    """
    started = time.monotonic_ns()
    checks = {"nats": not_yet, "models": not_yet}
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_metrics(settings, checks))
        broker = await stack.enter_async_context(
            connect(settings.nats, f"worker-{settings.id}", settings.nats_files)
        )
        checks["nats"] = lambda: broker.is_connected
        drain = DrainController(broker, settings.id)
        await drain.listen()
        stop_task = asyncio.create_task(
            drain.drain_on_stop(stop, settings.drain_seconds), name="stop"
        )
        stack.callback(stop_task.cancel)
        watch = _watch_for_reclaim(stack, broker, settings, drain)
        registry = await Registry.open(broker, seconds=WAIT_SECONDS)
        stack.push_async_callback(registry.close)
        report = DrainReport()
        models = await _run_unless(
            drain.started, _build_models(broker, registry, settings, started)
        )
        if models is not None:
            manager = models.manager
            reporter = ComputeReporter(broker, manager.meter, manager.identities)
            stack.push_async_callback(reporter.finish)
            stack.push_async_callback(manager.close)
            await _run_unless(drain.started, manager.preload())
            if not drain.started.is_set():
                checks["models"] = lambda: manager.can_serve and not drain.started.is_set()
                report = await _serve(broker, models, reporter, settings, drain)
        await drain.send_report(report)
        if watch:
            await watch.acknowledge()


def _watch_for_reclaim(
    stack: AsyncExitStack, broker: Broker, settings: WorkerSettings, drain: DrainController
) -> ReclaimWatch | None:
    """Watch for notices in a task until the stack closes; None if the settings name no provider."""
    if settings.reclaim_notices is None:
        return None
    source = make_source(settings.reclaim_notices, settings.metadata_url, broker.clock.now)
    watch = ReclaimWatch(broker, source, drain)
    task = asyncio.create_task(watch.run(), name="reclaim-notices")
    stack.callback(task.cancel)
    return watch


async def _run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` and return its result; once `stop` is set, cancel it and return None."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait({working, stopping})


@dataclass(frozen=True)
class _Models:
    """The parts of a worker that know its models."""

    manager: ModelManager
    follower: ServedModelsFollower


async def _build_models(
    broker: Broker, registry: Registry, settings: WorkerSettings, started: int
) -> _Models:
    """Return the manager of the configured models, none of which is loaded yet, and its follower.

    The worker's time counts from `started`, in monotonic nanoseconds.

    Raises `NotRegistered`, `ModelRefused` for a model whose record decides more than the settings
    allow, and `DoesNotFit` for a model that is too large even alone.
    """
    versions = await wait_for_models(registry, settings.model)
    for model, version in versions.values():
        check_model(settings.destinations, model, version)
    plan = MemoryPlan(settings)
    memory = await plan.divide(versions)
    meter = ComputeMeter(versions, started)

    def make_model(model: Model, version: Version) -> ManagedModel:
        name = f"{model.name}@{version.id}"
        server = _build_server(broker, model, version, settings, meter.of_model(name))
        return ManagedModel(server, model, version)

    planner = EvictionPlanner(
        memory.budget, memory.shares, settings.min_residency_seconds, memory.needs
    )
    limits_memory = settings.memory is not None
    manager = ModelManager(planner, Loader(settings), meter, limits_memory)
    for name, found in versions.items():
        manager.add(name, make_model(*found))
    return _Models(manager, ServedModelsFollower(registry, settings, manager, plan, make_model))


def _build_server(
    broker: Broker, model: Model, version: Version, settings: WorkerSettings, meter: ModelMeter
) -> ModelServer:
    own = (settings.id, settings.shards, settings.type or "", settings.price)
    identity = WorkerIdentity(model.name, version.id, *own)
    timeout = settings.engine_timeout_seconds
    return ModelServer(broker, identity, version.context_length, observe_finished, timeout, meter)


async def _subscribe(broker: Broker, worker: str, manager: ModelManager) -> BrokerSubscription:
    """Hear cancels, and answer the questions asked of this worker or of all, while connected.

    Returns the subscription to "who serves this request?", which a drained worker ends first.
    """

    async def on_cancel(cancelled: tuple[str, str]) -> None:
        for server in manager.servers:
            server.cancel(*cancelled)

    async def on_find(msg: Msg) -> None:
        found = subjects.parse_request_id(msg.subject)
        if any(server.has_request(*found) for server in manager.servers):
            await broker.publish(msg.reply, b"known")

    async def on_alive(msg: Msg) -> None:
        await broker.publish(msg.reply)

    async def on_written(msg: Msg) -> None:
        query = messages.from_wire(RecordsQuery, messages.unpack(msg.data))
        pages = (server.read_cached_log(query) for server in manager.servers)
        page = next(filter(None, pages), None)
        if page or msg.subject != subjects.WRITTEN_BY_ANY:
            await broker.publish(msg.reply, messages.pack(page))

    await broker.subscribe(subjects.alive(worker), on_alive)
    await broker.subscribe(subjects.written(worker), on_written)
    await broker.subscribe(subjects.WRITTEN_BY_ANY, on_written)
    cancels = SignalHandler(signals.parse_cancel, on_cancel)
    await broker.subscribe(subjects.heard(subjects.ALL_CANCELS), cancels.receive)
    return await broker.subscribe(subjects.ALL_FINDS, on_find)


async def _serve(
    broker: Broker,
    models: _Models,
    reporter: ComputeReporter,
    settings: WorkerSettings,
    drain: DrainController,
) -> DrainReport:
    """Serve until the drain starts, then drain every model server and report the work's fate."""
    manager = models.manager
    await declaration.wait_for_stream(broker, topology.WORK)
    await sync_clock(broker)
    finds = await _subscribe(broker, settings.id, manager)
    async with asyncio.TaskGroup() as tasks:
        managing = tasks.create_task(
            manager.run(settings.beat_seconds, settings.ack_wait_seconds), name="model-manager"
        )
        following = tasks.create_task(models.follower.run(), name="served-models")
        exporting = tasks.create_task(
            _export_metrics(manager, settings.beat_seconds), name="metrics"
        )
        reporting = tasks.create_task(reporter.run(), name="worker-time")
        await drain.started.wait()
        following.cancel()
        await asyncio.wait({following})
        servers = manager.servers
        for server in servers:
            server.is_reclaimed = drain.is_reclaimed
        held = sum(server.credit.held for server in servers)
        log.info("draining", attempts=held, at_most_seconds=round(drain.seconds_left(), 1))
        handed_over = sum(await asyncio.gather(*(s.drain(drain.seconds_left) for s in servers)))
        report = DrainReport(held - handed_over, handed_over)
        log.info("drained", **vars(report))
        await asyncio.gather(*(s.announce_drained(vars(report)) for s in servers))
        await finds.unsubscribe()
        for task in (managing, exporting, reporting):
            task.cancel()
    return report


async def _export_metrics(manager: ModelManager, seconds: float) -> None:
    """Export credit and engine stats every `seconds`; what is served no longer disappears."""
    shown: set[tuple[str, str]] = set()
    try:
        while True:
            servers = {(s.identity.model, s.identity.version): s for s in manager.servers}
            for gone in shown - servers.keys():
                forget_model(*gone)
            for served, server in servers.items():
                observe_heartbeat(server.build_heartbeat())
                ENGINE_STATS.set_stats(*served, server.stats)
            shown = {*servers}
            observe_models(len(manager.taken_bytes), len(manager.models), len(manager.not_loaded))
            await asyncio.sleep(seconds)
    finally:
        for served in shown:
            ENGINE_STATS.set_stats(*served, None)

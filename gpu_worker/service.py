"""The worker service (`millstream worker`): loads models, announces credit, serves, drains."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from nats.aio.msg import Msg

from gpu_worker.compute_meter import ComputeMeter, ModelMeter
from gpu_worker.compute_reporter import ComputeReporter
from gpu_worker.drain_controller import DrainController
from gpu_worker.engines import factory
from gpu_worker.identity import WorkerIdentity
from gpu_worker.metrics import ENGINE_STATS, observe_finished, observe_heartbeat
from gpu_worker.models import model_eviction
from gpu_worker.models.loading import Loader, run_in_thread, weight_files
from gpu_worker.models.model_eviction import EvictionPlanner
from gpu_worker.models.model_manager import ManagedModel, ModelManager
from gpu_worker.models.record_checks import check_model
from gpu_worker.models.registration import wait_for_models
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
        manager = await _run_unless(
            drain.started, _build_manager(broker, registry, settings, started)
        )
        if manager is not None:
            reporter = ComputeReporter(broker, manager.meter, manager.identities)
            stack.push_async_callback(reporter.finish)
            stack.push_async_callback(manager.close)
            await _run_unless(drain.started, manager.preload())
            if not drain.started.is_set():
                checks["models"] = lambda: manager.can_serve and not drain.started.is_set()
                report = await _serve(broker, manager, reporter, settings, drain)
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


async def _build_manager(
    broker: Broker, registry: Registry, settings: WorkerSettings, started: int
) -> ModelManager:
    """Return a manager of the configured models, none of which is loaded yet.

    The worker's time counts from `started`, in monotonic nanoseconds.

    Raises `NotRegistered`, `ModelRefused` for a model whose record decides more than the settings
    allow, and `DoesNotFit` for a model that is too large even alone.
    """
    versions = await wait_for_models(registry, settings.model)
    for model, version in versions.values():
        check_model(settings.destinations, model, version)
    budget, shares = await _plan_memory(versions, settings)
    meter = ComputeMeter(versions, started)
    models = {
        name: ManagedModel(
            _build_server(broker, model, version, settings, meter.of_model(name)),
            model,
            version,
            shares[name] or None,
        )
        for name, (model, version) in versions.items()
    }
    planner = EvictionPlanner(budget, shares, settings.min_residency_seconds)
    return ModelManager(models, planner, Loader(settings), meter)


async def _plan_memory(
    versions: dict[str, tuple[Model, Version]], settings: WorkerSettings
) -> tuple[int, dict[str, int]]:
    """Return the memory budget and each model's share of it, in bytes; a share of 0 is unbounded.

    Without `--memory`, a single model and models without weights are not bounded.
    """
    if settings.memory is None and (
        len(versions) == 1 or not any(weight_files(version) for _, version in versions.values())
    ):
        return 0, dict.fromkeys(versions, 0)
    needed = {name: await _needed_bytes(*each, settings) for name, each in versions.items()}
    if settings.memory is not None:
        return settings.memory, model_eviction.divide_budget(settings.memory, needed)
    free, share = await run_in_thread(factory.free_memory, "memory")
    budget = model_eviction.compute_budget(free, needed.values(), share)
    return budget, model_eviction.divide_budget(budget, needed)


async def _needed_bytes(model: Model, version: Version, settings: WorkerSettings) -> int:
    """Return the least memory, in bytes, to plan for a model; 0 for one without weights here."""
    if not (files := weight_files(version)):
        return 0
    directory = Path(version.directory or "")
    size = await run_in_thread(
        partial(factory.loaded_weight_bytes, directory, files, model.engine), "memory"
    )
    adapter_bytes = settings.adapter_bytes if model.engine == "transformers" else 0
    return model_eviction.estimate_needed_bytes(size, adapter_bytes)


def _build_server(
    broker: Broker, model: Model, version: Version, settings: WorkerSettings, meter: ModelMeter
) -> ModelServer:
    own = (settings.id, settings.shards, settings.type or "", settings.price)
    identity = WorkerIdentity(model.name, version.id, *own)
    timeout = settings.engine_timeout_seconds
    return ModelServer(broker, identity, model.context_length, observe_finished, timeout, meter)


async def _subscribe(broker: Broker, worker: str, servers: list[ModelServer]) -> BrokerSubscription:
    """Hear cancels, and answer the questions asked of this worker or of all, while connected.

    Returns the subscription to "who serves this request?", which a drained worker ends first.
    """

    async def on_cancel(cancelled: tuple[str, str]) -> None:
        for server in servers:
            server.cancel(*cancelled)

    async def on_find(msg: Msg) -> None:
        if any(server.has_request(*subjects.parse_request_id(msg.subject)) for server in servers):
            await broker.publish(msg.reply, b"known")

    async def on_alive(msg: Msg) -> None:
        await broker.publish(msg.reply)

    async def on_written(msg: Msg) -> None:
        query = messages.from_wire(RecordsQuery, messages.unpack(msg.data))
        pages = (server.read_cached_log(query) for server in servers)
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
    manager: ModelManager,
    reporter: ComputeReporter,
    settings: WorkerSettings,
    drain: DrainController,
) -> DrainReport:
    """Serve until the drain starts, then drain every model server and report the work's fate."""
    servers = manager.servers
    await declaration.wait_for_stream(broker, topology.WORK)
    await sync_clock(broker)
    finds = await _subscribe(broker, settings.id, servers)
    async with asyncio.TaskGroup() as tasks:
        serving = [
            tasks.create_task(
                server.run(settings.beat_seconds, settings.ack_wait_seconds),
                name=server.identity.model,
            )
            for server in servers
        ]
        managing = tasks.create_task(manager.run(), name="model-manager")
        exporting = tasks.create_task(
            _export_metrics(servers, settings.beat_seconds), name="metrics"
        )
        reporting = tasks.create_task(reporter.run(), name="worker-time")
        await drain.started.wait()
        for server in servers:
            server.is_reclaimed = drain.is_reclaimed
        held = sum(server.credit.held for server in servers)
        log.info("draining", attempts=held, at_most_seconds=round(drain.seconds_left(), 1))
        handed_over = sum(await asyncio.gather(*(s.drain(drain.seconds_left) for s in servers)))
        report = DrainReport(held - handed_over, handed_over)
        log.info("drained", **vars(report))
        await asyncio.gather(*(s.announce_drained(vars(report)) for s in servers))
        await finds.unsubscribe()
        for task in (*serving, managing, exporting, reporting):
            task.cancel()
    return report


async def _export_metrics(servers: list[ModelServer], seconds: float) -> None:
    """Export credit and engine stats every `seconds`; on cancel the engine stats disappear."""
    try:
        while True:
            for server in servers:
                observe_heartbeat(server.build_heartbeat())
                ENGINE_STATS.set_stats(server.identity.model, server.identity.version, server.stats)
            await asyncio.sleep(seconds)
    finally:
        for server in servers:
            ENGINE_STATS.set_stats(server.identity.model, server.identity.version, None)

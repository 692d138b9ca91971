"""`millstream worker`: load models, announce credit, serve, drain."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from nats.aio.msg import Msg
from prometheus_client import start_http_server

from gpu_worker.drain import DrainController, DrainReport
from gpu_worker.engines import factory
from gpu_worker.identity import WorkerIdentity
from gpu_worker.metrics import ENGINE_STATS, observe_finished, observe_heartbeat
from gpu_worker.models import model_eviction
from gpu_worker.models.loading import Loader, run_in_thread, weight_bytes
from gpu_worker.models.model_eviction import EvictionPlanner
from gpu_worker.models.model_manager import ManagedModel, ModelManager
from gpu_worker.pool.model_server import ModelServer
from gpu_worker.settings import WorkerSettings
from registry.models import Model, Version
from registry.store import Registry
from streams import messages, subjects, topology
from streams.broker import declaration
from streams.broker.clock_sync import sync_clock
from streams.broker.connection import Broker, BrokerSubscription, connect
from streams.errors import BrokerUnavailable, ModelNotFound
from streams.records.token_log_cache import RecordsQuery

log = structlog.get_logger()

REGISTRATION_WAIT_SECONDS = 60.0  # for a model to be registered that the worker shall serve
T = TypeVar("T")


async def run(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serve the configured models until `stop` or a drain; loading ends at once."""
    if settings.metrics_port:
        start_http_server(settings.metrics_port)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(connect(settings.nats, f"worker-{settings.id}"))
        leaving = DrainController(broker, settings.id)
        await leaving.listen()
        following = asyncio.create_task(
            leaving.drain_on_stop(stop, settings.drain_seconds), name="stop"
        )
        stack.callback(following.cancel)
        registry = await Registry.open(broker, replicas=settings.replicas)
        stack.push_async_callback(registry.close)
        drained = DrainReport()
        keeper = await _run_unless(leaving.started, _build_manager(broker, registry, settings))
        if keeper is not None:
            stack.push_async_callback(keeper.close)
            await _run_unless(leaving.started, keeper.preload())
            if not leaving.started.is_set():
                drained = await _serve(broker, keeper, settings, leaving)
        await leaving.send_report(drained)


async def _run_unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None as soon as `stop` is set; it is cancelled then."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait({working, stopping})


async def _build_manager(
    broker: Broker, registry: Registry, settings: WorkerSettings
) -> ModelManager:
    """The models' places, none loaded yet. Raises `DoesNotFit` for one that is too large alone."""
    found = {}
    for name in settings.model:
        model, version = await _resolve(registry, name)
        found[f"{model.name}@{version.id}"] = model, version
    budget, shares = await _plan_memory(found, settings)
    places = {
        name: ManagedModel(
            _build_server(broker, model, version, settings), model, version, shares[name] or None
        )
        for name, (model, version) in found.items()
    }
    books = EvictionPlanner(budget, shares, settings.min_residency_seconds)
    return ModelManager(places, books, Loader(settings))


async def _plan_memory(
    found: dict[str, tuple[Model, Version]], settings: WorkerSettings
) -> tuple[int, dict[str, int]]:
    """The budget and each model's share of it; a share of 0 is not bounded."""
    if settings.memory is None and (
        len(found) == 1 or not any(weight_bytes(version) for _, version in found.values())
    ):
        return 0, dict.fromkeys(found, 0)
    least = {name: await _needed_bytes(*each, settings) for name, each in found.items()}
    if settings.memory is not None:
        return settings.memory, model_eviction.divide_budget(settings.memory, least)
    free, share = await run_in_thread(factory.free_memory, "memory")
    budget = model_eviction.compute_budget(free, least.values(), share)
    return budget, model_eviction.divide_budget(budget, least)


async def _needed_bytes(model: Model, version: Version, settings: WorkerSettings) -> int:
    """The least that a model is planned with; 0 for one without weights here."""
    size = weight_bytes(version)
    if not size or version.directory is None:
        return 0
    grown = await run_in_thread(
        partial(factory.loaded_size_ratio, Path(version.directory)), "memory"
    )
    adapter_bytes = settings.adapter_bytes if model.engine == "transformers" else 0
    return model_eviction.estimate_needed_bytes(int(size * grown), adapter_bytes)


def _build_server(
    broker: Broker, model: Model, version: Version, settings: WorkerSettings
) -> ModelServer:
    who = WorkerIdentity(model.name, version.id, settings.id, settings.shards, model.goals)
    timeout = settings.engine_timeout_seconds
    return ModelServer(broker, who, model.context_length, observe_finished, timeout)


async def _resolve(registry: Registry, name: str) -> tuple[Model, Version]:
    """Waits a while for a model that is still to be registered; raises `ModelNotFound`."""
    if not _is_registered(registry, name):
        log.warning("waiting_for_model", model=name, at_most_seconds=REGISTRATION_WAIT_SECONDS)
    with suppress(BrokerUnavailable):  # it did not come: `resolve` says so by its name
        await registry.wait_until(
            lambda: _is_registered(registry, name), seconds=REGISTRATION_WAIT_SECONDS
        )
    return registry.resolve(name)


def _is_registered(registry: Registry, name: str) -> bool:
    try:
        registry.resolve(name)
    except ModelNotFound:
        return False
    return True


async def _subscribe(broker: Broker, worker: str, pools: list[ModelServer]) -> BrokerSubscription:
    """Answer what is asked of a worker, or of all; returns what is to end first."""

    async def on_cancel(msg: Msg) -> None:
        tenant, request_id = subjects.parse_request_id(msg.subject)
        for pool in pools:
            pool.cancel(tenant, request_id)

    async def on_find(msg: Msg) -> None:
        if any(pool.has_request(*subjects.parse_request_id(msg.subject)) for pool in pools):
            await broker.publish(msg.reply, b"known")

    async def on_alive(msg: Msg) -> None:
        await broker.publish(msg.reply)

    async def on_written(msg: Msg) -> None:
        question = messages.from_wire(RecordsQuery, messages.unpack(msg.data))
        pages = (pool.read_cached_log(question) for pool in pools)
        page = next(filter(None, pages), None)
        if page or msg.subject != subjects.WRITTEN_BY_ANY:
            await broker.publish(msg.reply, messages.pack(page))

    await broker.subscribe(subjects.alive(worker), on_alive)
    await broker.subscribe(subjects.written(worker), on_written)
    await broker.subscribe(subjects.WRITTEN_BY_ANY, on_written)
    await broker.subscribe(subjects.ALL_CANCELS, on_cancel)
    return await broker.subscribe(subjects.ALL_FINDS, on_find)


async def _serve(
    broker: Broker, keeper: ModelManager, settings: WorkerSettings, leaving: DrainController
) -> DrainReport:
    pools = keeper.servers
    await declaration.wait_for_stream(broker, topology.WORK)
    await sync_clock(broker)
    finding = await _subscribe(broker, settings.id, pools)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                pool.run(settings.beat_seconds, settings.ack_wait_seconds), name=pool.identity.model
            )
            for pool in pools
        ]
        keeping = tasks.create_task(keeper.run(), name="keeper")
        showing = tasks.create_task(_export_metrics(pools, settings.beat_seconds), name="metrics")
        await leaving.started.wait()
        held = sum(pool.credit.held for pool in pools)
        log.info("draining", attempts=held, at_most_seconds=round(leaving.seconds_left(), 1))
        handed_over = sum(await asyncio.gather(*(p.drain(leaving.seconds_left) for p in pools)))
        drained = DrainReport(held - handed_over, handed_over)
        log.info("drained", **drained._asdict())
        await finding.unsubscribe()
        for task in (*running, keeping, showing):
            task.cancel()
    return drained


async def _export_metrics(pools: list[ModelServer], seconds: float) -> None:
    try:
        while True:
            for pool in pools:
                observe_heartbeat(pool.build_heartbeat())
                ENGINE_STATS.set_stats(pool.identity.model, pool.identity.version, pool.stats)
            await asyncio.sleep(seconds)
    finally:
        for pool in pools:
            ENGINE_STATS.set_stats(pool.identity.model, pool.identity.version, None)

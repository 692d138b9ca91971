"""`millstream worker`: load models, announce credit, serve, drain."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
from nats.aio.msg import Msg
from prometheus_client import start_http_server

from gpu_worker.attempt import Identity
from gpu_worker.engine import Engine
from gpu_worker.engines import factory
from gpu_worker.metrics import observe_beat, observe_finished
from gpu_worker.pool import Pool
from gpu_worker.settings import WorkerSettings
from registry import artifacts
from registry.models import Model, Version
from registry.store import Registry
from streams import subjects, topology
from streams.connection import Broker, connect
from streams.errors import ModelNotFound

log = structlog.get_logger()


async def run(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serve the configured models until `stop`, then drain."""
    if settings.metrics_port:
        start_http_server(settings.metrics_port)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(connect(settings.nats, f"worker-{settings.id}"))
        registry = await Registry.open(broker, replicas=settings.replicas)
        stack.push_async_callback(registry.close)
        pools = [await _load(broker, registry, settings, name) for name in settings.model]
        for pool in pools:
            stack.callback(pool.close)
        await _serve(broker, pools, settings, stop)


async def _load(broker: Broker, registry: Registry, settings: WorkerSettings, name: str) -> Pool:
    await registry.until(lambda: _known(registry, name), seconds=60)
    model, version = registry.resolve(name)
    engine = await asyncio.to_thread(_build, model, version, settings)
    who = Identity(model.name, version.id, settings.id, settings.shards, model.goals)
    return Pool(broker, who, engine, observe_finished)


def _known(registry: Registry, name: str) -> bool:
    try:
        registry.resolve(name)
    except ModelNotFound:
        return False
    return True


def _build(model: Model, version: Version, settings: WorkerSettings) -> Engine:
    """Verify, load and warm up; credit is announced only after this."""
    directory = Path(version.directory) if version.directory else None
    if directory:
        artifacts.verify(directory, version.files)
    options = dict(version.options)
    if model.engine == "transformers":
        options |= {
            "max_sequences": settings.max_sequences,
            "max_batch_tokens": settings.max_batch_tokens,
            "kv_tokens": settings.kv_tokens,
            "adapter_bytes": settings.adapter_bytes,
            "threads": settings.threads,
        }
    engine = factory.build(model.engine, directory, options)
    room = engine.room()
    log.info(
        "model_ready",
        model=model.name,
        version=version.id,
        engine=model.engine,
        max_sequences=room.sequences,
        kv_tokens=room.tokens,
    )
    return engine


async def _serve(
    broker: Broker, pools: list[Pool], settings: WorkerSettings, stop: asyncio.Event
) -> None:
    async def on_cancel(msg: Msg) -> None:
        tenant, request_id = subjects.parse_request_id(msg.subject)
        for pool in pools:
            pool.cancel(tenant, request_id)

    await topology.wait_for(broker.js, topology.WORK)
    await broker.subscribe(subjects.ALL_CANCELS, on_cancel)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                pool.run(settings.beat_seconds, settings.ack_wait_seconds), name=pool.who.model
            )
            for pool in pools
        ]
        showing = tasks.create_task(_show(pools, settings.beat_seconds), name="metrics")
        await stop.wait()
        log.info("draining", attempts=sum(pool.credit.held for pool in pools))
        await asyncio.gather(*(pool.drain(settings.drain_seconds) for pool in pools))
        for task in (*running, showing):
            task.cancel()


async def _show(pools: list[Pool], seconds: float) -> None:
    while True:
        for pool in pools:
            observe_beat(pool.beat())
        await asyncio.sleep(seconds)

"""`millstream jobs`: builds the parts of one jobs process and runs them."""

import asyncio
from contextlib import AsyncExitStack

import structlog

from jobs.file_sweeper import FileSweeper
from jobs.settings import JobsSettings
from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import connect
from streams.broker.clock_sync import sync_clock
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import LeaseBucket
from streams.metrics_server import not_yet, serve_metrics

log = structlog.get_logger()

FILES_LEASE = "jobs.files"


async def run(settings: JobsSettings, stop: asyncio.Event) -> None:
    """Work until `stop` is set; then release all leases, so that another process goes on at once.

    Raises `BrokerUnavailable` if the broker does not answer at the start, in an exception group
    later.
    """
    checks = {"nats": not_yet, "running": not_yet}
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_metrics(settings, checks))
        name = f"jobs-{settings.id}"
        broker = await stack.enter_async_context(connect(settings.nats, name, settings.nats_files))
        checks["nats"] = lambda: broker.is_connected
        await declaration.wait_for_stream(broker, topology.FILE_RECORDS)
        await sync_clock(broker)
        lease = Lease(broker, FILES_LEASE, settings.id, LeaseBucket(broker))
        stack.push_async_callback(lease.release)
        async with asyncio.TaskGroup() as tasks:
            working = [
                tasks.create_task(lease.run(), name="lease"),
                tasks.create_task(FileSweeper(broker, lease).run(), name="files"),
            ]
            checks["running"] = lambda: not stop.is_set()
            log.info("jobs_running", id=settings.id)
            await stop.wait()
            for task in working:
                task.cancel()

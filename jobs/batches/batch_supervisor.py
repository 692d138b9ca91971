"""Finds batches that have not ended, and runs each of them under a lease."""

import asyncio
from collections.abc import Iterable

import structlog
from nats.aio.msg import Msg

from jobs.batches.batch_runner import BatchRunner, RunnerParts
from jobs.metrics import RUNNING_BATCHES
from streams import job_subjects, subjects
from streams.broker.broker_client import StoreRefused
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import LeaseBucket
from streams.errors import BrokerUnavailable, MillstreamError
from streams.records.jobs.batch_records import Batch

log = structlog.get_logger()

LOOK_SECONDS = 5.0
MAX_RUNNING = 64  # by one process: each holds its lease and some lines
RETRY_SECONDS = 1.0


class BatchSupervisor:
    """The batches that this process runs, or stands by for."""

    def __init__(self, parts: RunnerParts, holder: str) -> None:
        self._parts, self._holder = parts, holder
        self._bucket = LeaseBucket(parts.broker)
        self._runners: dict[str, BatchRunner] = {}
        self._followed: set[str] = set()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Look for batches every `LOOK_SECONDS` (5 s), and when one is said to have changed.

        Until cancelled; cancelling gives up all leases.
        """
        await self._parts.broker.subscribe(job_subjects.ALL_BATCH_CHANGES, self._on_change)
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                for batch in await self._list_unfinished():
                    if batch.id not in self._followed and len(self._followed) < MAX_RUNNING:
                        self._followed.add(batch.id)
                        tasks.create_task(self._follow(batch), name=f"batch-{batch.id}")
                await self._wait()

    def repeat_requests(self) -> None:
        """Publish the requests of all batches again that are under way. Returns at once.

        To be called when the stream that held them is another one.
        """
        for runner in self._runners.values():
            runner.repeat_requests()

    async def _on_change(self, msg: Msg) -> None:
        _, batch_id = subjects.parse_request_id(msg.subject)
        if runner := self._runners.get(batch_id):
            runner.wake()
        else:
            self._changed.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _list_unfinished(self) -> Iterable[Batch]:
        try:
            return await self._parts.batches.list_unfinished()
        except BrokerUnavailable as error:
            log.warning("batches_not_listed", reason=str(error))
            return ()

    async def _follow(self, batch: Batch) -> None:
        """Campaign for the lease of a batch, and run it while it is held, until it has ended."""
        lease = Lease(self._parts.broker, f"batch.{batch.id}", self._holder, self._bucket)
        campaign = asyncio.create_task(lease.run(), name=f"lease-{batch.id}")
        try:
            while not await self._has_ended(batch):
                await lease.gained.wait()
                await lease.run_while_held(self._run(batch))
        finally:
            campaign.cancel()
            self._followed.discard(batch.id)
            await lease.release()

    async def _has_ended(self, batch: Batch) -> bool:
        try:
            newest = await self._parts.batches.find(batch.tenant, batch.id)
        except BrokerUnavailable:
            return False
        return newest is None or newest.is_over

    async def _run(self, batch: Batch) -> None:
        try:
            newest = await self._parts.batches.find(batch.tenant, batch.id)
            if newest is None or newest.is_over:
                return
            runner = self._runners[batch.id] = BatchRunner(self._parts, newest)
            RUNNING_BATCHES.set(len(self._runners))
            await runner.run()
        except (MillstreamError, StoreRefused) as error:
            log.warning("batch_interrupted", batch=batch.id, reason=str(error))
            await asyncio.sleep(RETRY_SECONDS)
        except Exception:
            log.exception("batch_broke", batch=batch.id)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._runners.pop(batch.id, None)
            RUNNING_BATCHES.set(len(self._runners))

"""Removes the bytes of files that were deleted or have expired, and then their records."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import structlog

from api.file_bodies import UPLOAD_SECONDS, file_id
from jobs.metrics import STORED_FILES, SWEPT_FILES
from streams import job_subjects, topology
from streams.broker.broker_client import Broker
from streams.coordination.lease import Lease
from streams.errors import MillstreamError
from streams.records.files.file_records import FileState, StoredFile
from streams.records.files.file_store import FileStore

log = structlog.get_logger()

SWEEP_SECONDS = 30.0
# Whoever still sends a file when it is deleted stops within an hour: until then chunks may come
KEPT_SECONDS = UPLOAD_SECONDS + 300


class FileSweeper:
    """Sweeps all tenants' files while this process holds the lease."""

    def __init__(self, broker: Broker, lease: Lease) -> None:
        self._broker, self._lease = broker, lease
        self._store = FileStore(broker)

    async def run(self) -> None:
        """Sweep every `SWEEP_SECONDS` (30 s) whenever this process leads, until cancelled.

        What the broker does not do is logged and tried again at the next sweep.
        """
        while True:
            await self._lease.gained.wait()
            try:
                await self.sweep()
            except MillstreamError as error:
                log.warning("files_not_swept", reason=str(error))
            await asyncio.sleep(SWEEP_SECONDS)

    async def sweep(self) -> None:
        """Go once through all records; idempotent, and safe from several processes at once.

        Raises `BrokerUnavailable`, `StoreRefused`, or `StorageFull` if a record finds no room.
        """
        counts: Counter[FileState] = Counter()
        async for file in self._iterate_records():
            counts[file.state] += 1
            await self._sweep_one(file)
        for state in FileState:
            STORED_FILES.labels(state.value).set(counts[state])

    async def _iterate_records(self) -> AsyncIterator[StoredFile]:
        after = 0
        while True:
            page = await self._broker.read_filtered(
                topology.FILE_RECORDS, job_subjects.ALL_FILE_RECORDS, after
            )
            for message in page.messages:
                after = message.seq
                try:
                    yield StoredFile.unpack(message.data, message.seq)
                except (ValueError, TypeError, KeyError) as error:
                    log.error("file_record_unreadable", seq=message.seq, reason=repr(error))
            if not page.messages or not page.remaining:
                return

    async def _sweep_one(self, file: StoredFile) -> None:
        now = self._broker.clock.now()
        if file.state is FileState.DELETED:
            await self._remove(file, is_final=now - file.ended_at > KEPT_SECONDS)
        elif file.is_gone(now):
            await self._store.expire(file)
        elif file.unused and now - file.created_at > UPLOAD_SECONDS + KEPT_SECONDS:
            await self._purge(file.tenant, file.unused)
            await self._forget_unused(file)

    async def _remove(self, file: StoredFile, *, is_final: bool) -> None:
        """Remove a deleted file's chunks, and its record once no more of them can come."""
        await self._purge(file.tenant, (*(part.id for part in file.parts), *file.unused))
        if is_final:
            await self._broker.remove(topology.FILE_RECORDS, file.revision)
            SWEPT_FILES.inc()
            log.info("file_removed", tenant=file.tenant, file=file_id(file), bytes=file.size)

    async def _purge(self, tenant: str, parts: tuple[str, ...]) -> None:
        for part in parts:
            await self._broker.purge(topology.FILES, job_subjects.file_chunks(tenant, part), 0)

    async def _forget_unused(self, file: StoredFile) -> None:
        try:
            await self._store.change(file, lambda it: replace(it, unused=()))
        except MillstreamError as error:
            log.warning("file_not_swept", tenant=file.tenant, reason=str(error))

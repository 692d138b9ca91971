"""Files of tenants in the broker: their records in the bucket `files`, their bytes in FILES.

A record is changed by compare-and-set and read by direct get. It names every part before a chunk of
it is stored, so whoever sweeps finds all chunks by the records. Nothing is removed here: a file
that was deleted or has expired is gone for every reader at once, and `millstream jobs` removes its
bytes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from streams import job_subjects, subjects, topology
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import MillstreamError, NotFound, StorageFull, StorageQuotaExceeded
from streams.headers import MAX_HEADER_BYTES
from streams.records.cas.cas_records import STORE_SECONDS, CasRecords, RecordChanged
from streams.records.files.chunk_cache import ChunkCache
from streams.records.files.file_records import (
    CHUNK_BYTES,
    INDEX_PURPOSE,
    ChunkRange,
    FilePart,
    FileState,
    StoredFile,
)

MAX_FILES = 10_000  # of a tenant, whose records are read together
CHUNKS_AT_ONCE = 4  # of one file, stored or read; more of them is slower with three replicas
_READS, _READ_SECONDS = 20, 0.05  # of a chunk that a replica may not have yet


class FileGone(NotFound):
    """The file was deleted, or its time was over, while it was being changed."""

    def __init__(self, filename: str) -> None:
        super().__init__(f"the file {filename!r} was deleted meanwhile, or its time is over")
        self.filename = filename


class ChunkMissing(MillstreamError):
    """A chunk of a file that is ready is not in the broker's store: part of its bytes is lost."""

    code = "file_lost"


def _subject_of(file: StoredFile) -> str:
    return job_subjects.file_record(file.tenant, file.id)


class FileStore:
    """The files of all tenants, stored by the broker.

    Chunks that were read are kept in `cache`, if there is one, and are not read again from there.
    """

    def __init__(self, broker: Broker, cache: ChunkCache | None = None) -> None:
        self._broker, self._cache = broker, cache
        self._records = CasRecords(broker, topology.FILE_RECORDS, StoredFile.unpack)

    async def create(self, file: StoredFile, quota: int) -> StoredFile:
        """Store the record of a new file, if the tenant's files have `quota` bytes with it at most.

        Two that are created at once may both be refused for want of room for both; they are never
        both accepted. Raises `StorageQuotaExceeded`, `StorageFull`, or `BrokerUnavailable`.
        """
        stored = await self._write_new(file)
        others = [each for each in await self.list(file.tenant) if each.id != file.id]
        used = sum(each.size for each in others)
        if used + file.size > quota or len(others) >= MAX_FILES:
            await self.delete(stored)
            if len(others) >= MAX_FILES:
                raise StorageQuotaExceeded(
                    f"the tenant has {len(others)} files, the most there may be"
                )
            raise StorageQuotaExceeded(
                f"the file of {file.size} bytes does not fit: the tenant's files have {used} "
                f"bytes, of {quota} at most; delete some, or have them expire sooner"
            )
        return stored

    async def _write_new(self, file: StoredFile) -> StoredFile:
        """Store a record in place of none, or of one that is gone."""
        try:
            return await self._records.write(_subject_of(file), file)
        except RecordChanged as conflict:
            gone = conflict.newer
            if gone is None or not gone.is_gone(self._now()):
                raise
            return await self._records.write(
                _subject_of(file), replace(file, revision=gone.revision)
            )

    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """Return a tenant's file, pending or ready; None if there is none, or it is gone.

        What another process has stored before is known here. Raises `BrokerUnavailable`.
        """
        try:
            subject = job_subjects.file_record(tenant, file_id)
        except subjects.InvalidToken:
            return None
        file = await self._records.read(subject)
        if file is None or file.state is not FileState.READY:  # as far as this replica knows
            file = await self._records.read_newest(subject)
        return None if file is None or file.is_gone(self._now()) else file

    async def list(self, tenant: str) -> list[StoredFile]:
        """Return a tenant's files that are not gone, pending ones too, the oldest first.

        Without indexes of batches, which are ours and count against no quota.

        Raises `BrokerUnavailable`.
        """
        found = await self._records.list_newest(job_subjects.file_records_of(tenant))
        now = self._now()
        present = [f for f in found if not f.is_gone(now) and f.purpose != INDEX_PURPOSE]
        return sorted(present, key=lambda file: (file.created_at, file.id))

    async def change(
        self, file: StoredFile, apply: Callable[[StoredFile], StoredFile]
    ) -> StoredFile:
        """Store `apply(file)` in place of the record, and return it.

        If another process was faster, `apply` is given what that has stored. Raises `FileGone`,
        whatever `apply` raises, `StorageFull`, or `BrokerUnavailable`.
        """

        def apply_unless_gone(found: StoredFile) -> StoredFile:
            if found.is_gone(self._now()):
                raise FileGone(file.filename)
            return apply(found)

        changed = await self._records.change(_subject_of(file), file, apply_unless_gone)
        if changed is None:
            raise FileGone(file.filename)
        return changed

    async def delete(self, file: StoredFile) -> None:
        """Mark a file as deleted; it is gone for everybody once this returns. Idempotent.

        Raises `BrokerUnavailable`, or `StorageFull`.
        """
        with suppress(FileGone):
            await self.change(file, self._as_deleted)

    async def expire(self, file: StoredFile) -> None:
        """Mark a file whose time is over as deleted, unless its record has changed meanwhile.

        Raises as `delete` does.
        """
        with suppress(RecordChanged):
            await self._records.write(_subject_of(file), self._as_deleted(file))

    def _as_deleted(self, file: StoredFile) -> StoredFile:
        return replace(file, state=FileState.DELETED, ended_at=int(self._now()))

    def _now(self) -> float:
        return self._broker.clock.now()

    def write_part(self, tenant: str, part: str, chunk_bytes: int = CHUNK_BYTES) -> "PartWriter":
        """Return a writer of the chunks of a part, which the file's record already names.

        Chunks have `chunk_bytes`, or less if the broker takes no such messages.
        """
        chunk_bytes = min(chunk_bytes, self._broker.max_payload - MAX_HEADER_BYTES)
        return PartWriter(self._broker, tenant, FilePart(part, chunk_bytes=chunk_bytes))

    async def read(
        self, file: StoredFile, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yield the bytes of a file from `start` to before `end`, a chunk at a time, in order.

        At most `CHUNKS_AT_ONCE` (4) chunks are in memory. Raises `ChunkMissing`, or
        `BrokerUnavailable`.
        """
        ranges = file.chunk_ranges(start, end)
        while group := tuple(islice(ranges, CHUNKS_AT_ONCE)):
            for data in await asyncio.gather(*map(self._read_range, group)):
                yield data

    async def _read_range(self, wanted: ChunkRange) -> bytes:
        chunk = self._cache.find(wanted.subject) if self._cache else None
        if chunk is None:
            chunk = await self._read_chunk(wanted.subject)
        return chunk[wanted.start : wanted.end]

    async def _read_chunk(self, subject: str) -> bytes:
        for _ in range(_READS):
            found = await self._broker.read(topology.FILES, {"last_by_subj": subject})
            if found:
                if self._cache:
                    self._cache.add(subject, found[0].data)
                return found[0].data
            await asyncio.sleep(_READ_SECONDS)  # until this replica has it, too
        raise ChunkMissing("part of this file is not in the broker's store any more")


class PartWriter:
    """Cuts the bytes of one part into chunks and stores them, a few at a time.

    Use as `async with`: leaving it stops what is under way.
    """

    def __init__(self, broker: Broker, tenant: str, part: FilePart) -> None:
        self._broker, self._tenant, self._part = broker, tenant, part
        self._rest = bytearray()
        self._numbers = 0
        self._storing: deque[asyncio.Task[None]] = deque()

    async def __aenter__(self) -> "PartWriter":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._storing:
            task.cancel()
        await asyncio.gather(*self._storing, return_exceptions=True)

    async def write(self, data: bytes) -> None:
        """Take bytes; wait while `CHUNKS_AT_ONCE` (4) chunks are being stored.

        Raises `StorageFull` or `BrokerUnavailable`, also for chunks that were taken before.
        """
        self._rest += data
        self._part = replace(self._part, size=self._part.size + len(data))
        while len(self._rest) >= self._part.chunk_bytes:
            await self._store(bytes(self._rest[: self._part.chunk_bytes]))
            del self._rest[: self._part.chunk_bytes]

    async def finish(self) -> FilePart:
        """Store what is left, and return the part, whole, once all its chunks are stored.

        Raises as `write` does.
        """
        if self._rest:
            await self._store(bytes(self._rest))
        while self._storing:
            await self._storing.popleft()
        return replace(self._part, is_whole=True)

    async def _store(self, chunk: bytes) -> None:
        while len(self._storing) >= CHUNKS_AT_ONCE:
            await self._storing.popleft()
        subject = job_subjects.file_chunk(self._tenant, self._part.id, self._numbers)
        self._numbers += 1
        task = asyncio.create_task(self._store_chunk(subject, chunk), name="store-chunk")
        self._storing.append(task)

    async def _store_chunk(self, subject: str, chunk: bytes) -> None:
        """Store a chunk; one that comes twice replaces itself."""
        try:
            await self._broker.store_retrying(subject, chunk, {}, STORE_SECONDS)
        except StoreRefused as refusal:
            if refusal.is_full:
                raise StorageFull(
                    "the store of files is full; nothing of this file is kept"
                ) from None
            raise

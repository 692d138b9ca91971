"""Renders the results of a batch into its output and its error file, in the order of the input."""

import hashlib
import hmac
from contextlib import AsyncExitStack
from typing import NamedTuple

from api.batches.batch_line import (
    BATCH_CANCELLED,
    BATCH_EXPIRED,
)
from api.batches.result_lines import render_lines
from api.file_bodies import UPLOAD_SECONDS
from registry.store import Registry
from streams.broker.broker_client import Broker
from streams.records.cas_records import RecordChanged
from streams.records.file_records import FilePart, FileState, StoredFile
from streams.records.file_store import FileStore
from streams.records.jobs.batch_records import Batch

PURPOSE = "batch_output"
_UNLIMITED = 2**63  # a batch that was accepted has its files, whatever the tenant's quota


class OutputFiles(NamedTuple):
    """The ids of a batch's files; empty for a file that would have no line."""

    output: str
    error: str


async def write_files(
    broker: Broker, registry: Registry, batch: Batch, source: StoredFile
) -> OutputFiles:
    """Store the files of a batch that has ended, and return their ids. Idempotent.

    Every line of the input is in one of the files. Raises `ChunkMissing`, `StorageFull` or
    `BrokerUnavailable`.
    """
    files = FileStore(broker)
    wanted = [_make_file(batch, kind, broker) for kind in ("output", "error")]
    begun = [await _begin(files, file) for file in wanted]
    expired = batch.expires_at <= broker.clock.now()
    unrun = BATCH_EXPIRED if expired else BATCH_CANCELLED
    async with AsyncExitStack() as stack:
        writers = [
            await stack.enter_async_context(files.write_part(file.tenant, file.id))
            for file in wanted
        ]
        async for line in render_lines(broker, registry, batch, source, unrun):
            await writers[line.is_error].write(line.data)
        parts = [await writer.finish() for writer in writers]
    pairs = zip(begun, parts, strict=True)
    return OutputFiles(*[await _finish(files, file, part) for file, part in pairs])


async def _begin(files: FileStore, file: StoredFile) -> StoredFile:
    """Store the record of a file, unless an earlier try has, and return what is stored.

    An earlier try has deleted a file that has no line: it has none now either.
    """
    try:
        return await files.find(file.tenant, file.id) or await files.create(file, _UNLIMITED)
    except RecordChanged as known:
        newest: StoredFile | None = known.newer
        if newest is None:
            raise
        return newest


async def _finish(files: FileStore, file: StoredFile, part: FilePart) -> str:
    """Make a file ready, or delete it if it has nothing in it; return its id, empty for none."""
    if not part.size:
        await files.delete(file)
        return ""
    if file.state is FileState.PENDING:
        await files.change(file, lambda it: it.as_ready((part,)))
    return file.id


def _make_file(batch: Batch, kind: str, broker: Broker) -> StoredFile:
    """Return the record of a file before it is written: the same id whoever writes it."""
    name = hmac.digest(batch.secret, kind.encode(), hashlib.sha256).hex()[:24]
    now = int(broker.clock.now())
    return StoredFile(
        tenant=batch.tenant,
        id=name,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose=PURPOSE,
        created_at=now,
        size=0,
        expires_at=now + UPLOAD_SECONDS,
        expires_after_seconds=batch.output_expires_after_seconds,
        parts=(FilePart(name),),
    )

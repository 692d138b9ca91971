"""Renders the results of a batch into its output and its error file, in the order of the input."""

import hashlib
import hmac
from contextlib import AsyncExitStack
from typing import NamedTuple

from api.batches.result_lines import render_lines
from api.file_bodies import UPLOAD_SECONDS
from registry.store import Registry
from streams.broker.broker_client import Broker
from streams.records.files.file_records import FilePart, StoredFile
from streams.records.files.file_store import FileStore, PartWriter
from streams.records.jobs.batch_records import Batch

PURPOSE = "batch_output"
_UNLIMITED = 2**63  # a batch that was accepted has its files, whatever the tenant's quota


class WrittenFile(NamedTuple):
    """A file of a batch: its id, empty for a file that would have no line, and its lines."""

    id: str
    lines: int


class OutputFiles(NamedTuple):
    """The files of a batch, and how many of its lines had not ended."""

    output: WrittenFile
    error: WrittenFile
    unrun: int


async def write_files(
    broker: Broker, registry: Registry, batch: Batch, source: StoredFile
) -> OutputFiles:
    """Store the output and the error file of a batch that is over. Idempotent.

    Every line of the input is in one of them. Raises `ChunkMissing`, `StorageFull` or
    `BrokerUnavailable`.
    """
    unrun = 0
    files, now = FileStore(broker), int(broker.clock.now())
    async with AsyncExitStack() as stack:
        output, error = [
            FileWriter(files, make_file(batch, kind, PURPOSE, now), stack)
            for kind in ("output", "error")
        ]
        async for line in render_lines(broker, registry, batch, source, is_over=True):
            unrun += line.is_unrun
            await (error if line.is_error else output).write(line.data)
        return OutputFiles(await output.finish(), await error.finish(), unrun)


class FileWriter:
    """Writes a file of a batch; one to which nothing is written is not created.

    What an earlier try has stored is replaced. Leaving `stack` stops what is under way.
    """

    def __init__(
        self, files: FileStore, file: StoredFile, stack: AsyncExitStack, **options: int
    ) -> None:
        self._files, self._file, self._stack, self._options = files, file, stack, options
        self._writer: PartWriter | None = None
        self._lines = 0

    async def write(self, line: bytes) -> None:
        """Take one line; raises `StorageFull` or `BrokerUnavailable`."""
        writer = self._writer or await self._begin()
        self._lines += 1
        await writer.write(line)

    async def _begin(self) -> PartWriter:
        tenant, name = self._file.tenant, self._file.id
        found = await self._files.find(tenant, name)
        self._file = found or await self._files.create(self._file, _UNLIMITED)
        writer = self._files.write_part(tenant, name, **self._options)
        self._writer = await self._stack.enter_async_context(writer)
        return self._writer

    async def finish(self) -> WrittenFile:
        """Make the file ready; raises as `write` does."""
        if self._writer is None:
            return WrittenFile("", 0)
        part = await self._writer.finish()
        await self._files.change(self._file, lambda it: it.as_ready((part,)))
        return WrittenFile(self._file.id, self._lines)


def make_file(batch: Batch, kind: str, purpose: str, now: int) -> StoredFile:
    """Return the record of a file of a batch before it is written: its id is always the same."""
    name = hmac.digest(batch.secret, kind.encode(), hashlib.sha256).hex()[:24]
    return StoredFile(
        tenant=batch.tenant,
        id=name,
        filename=f"{batch.id}_{kind}.jsonl",
        purpose=purpose,
        created_at=now,
        size=0,
        expires_at=now + UPLOAD_SECONDS,
        expires_after_seconds=batch.output_expires_after_seconds,
        parts=(FilePart(name),),
    )

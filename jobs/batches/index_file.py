"""Stores the index of a batch's input, by which one line is found by its `custom_id`."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

from api.batches.line_index import CHUNK_BYTES, LinePlace, iterate_entries
from jobs.batches.output_files import FileWriter, make_file
from streams.broker.broker_client import Broker
from streams.records.files.file_records import INDEX_PURPOSE
from streams.records.files.file_store import FileStore
from streams.records.jobs.batch_records import Batch
from streams.topology import MONTH_SECONDS


async def write_index(broker: Broker, batch: Batch, places: Mapping[bytes, LinePlace]) -> str:
    """Store the places of a batch's lines, by the hashes of their ids; return the file's id.

    Idempotent. Raises `StorageFull` or `BrokerUnavailable`.
    """
    now = int(broker.clock.now())
    kept = batch.expires_at - now + MONTH_SECONDS  # as long as there may be results
    file = replace(make_file(batch, "index", INDEX_PURPOSE, now), expires_after_seconds=kept)
    async with AsyncExitStack() as stack:
        writer = FileWriter(FileStore(broker), file, stack, chunk_bytes=CHUNK_BYTES)
        for entry in iterate_entries(places):
            await writer.write(entry)
        return (await writer.finish()).id

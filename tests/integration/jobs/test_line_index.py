"""The index of a batch's input finds each line, and none that is not there."""

import pytest

from api.batches import line_index
from api.batches.line_index import LinePlace, find_place, hash_id, iterate_entries
from streams.broker.broker_client import Broker
from streams.records.files.file_records import FilePart, StoredFile
from streams.records.files.file_store import FileStore
from tests.support.accounts_server import connect
from tests.support.gateways import gateways


async def store_index(broker: Broker, count: int) -> StoredFile:
    """An index of lines of 10 bytes with the ids `id-0`, `id-1` …"""
    places = {hash_id(f"id-{i}"): LinePlace(i, 10 * i, 10 * i + 10) for i in range(count)}
    files, now = FileStore(broker), int(broker.clock.now())
    record = StoredFile("acme", "index", "index", "user_data", now, 0, now + 3600)
    file = await files.create(record.with_part(FilePart("index")), 2**30)
    async with files.write_part("acme", "index", line_index.CHUNK_BYTES) as writer:
        for entry in iterate_entries(places):
            await writer.write(entry)
        part = await writer.finish()
    return await files.change(file, lambda it: it.as_ready((part,)))


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 30_000])
async def test_every_line_is_found_by_its_id(nats_url: str, count: int) -> None:
    """A line is found in any chunk; an id that no line has is not."""
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        index, files = await store_index(broker, count), FileStore(broker)
        for i in range(0, count, max(1, count // 200)):
            assert await find_place(files, index, f"id-{i}") == LinePlace(i, 10 * i, 10 * i + 10)
        for i in range(100):
            assert await find_place(files, index, f"other-{i}") is None

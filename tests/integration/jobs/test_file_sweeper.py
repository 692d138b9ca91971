"""The jobs service removes the bytes of files that are gone, and of nothing else."""

from dataclasses import replace

import pytest

import jobs.service
from jobs import file_sweeper
from jobs.file_sweeper import FileSweeper
from streams import job_subjects, topology
from streams.broker.broker_client import Broker
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import LeaseBucket
from streams.errors import StorageFull
from streams.records.files.file_records import FilePart, StoredFile
from streams.records.files.file_store import FileStore
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import gateways
from tests.support.services import jobs_settings, running

GIB = 2**30


async def store(broker: Broker, name: str, data: bytes, *parts: FilePart) -> StoredFile:
    """A file of one part that is ready, with further parts that are not used."""
    files, now = FileStore(broker), int(broker.clock.now())
    record = StoredFile("acme", name, f"{name}.txt", "user_data", now, len(data), now + 3600)
    for part in (FilePart(name), *parts):
        record = record.with_part(part)
    file = await files.create(record, GIB)
    async with files.write_part("acme", name) as writer:
        await writer.write(data)
        part = await writer.finish()
    return await files.change(file, lambda it: it.as_ready((part,)))


async def chunks_of(broker: Broker, part: str) -> int:
    pattern = job_subjects.file_chunks("acme", part)
    return len(await broker.read_subject(topology.FILES, pattern))


async def test_what_was_deleted_or_expired_is_removed_and_the_rest_stays(nats_url: str) -> None:
    """By a service that runs: first the bytes, and the record when no more of them can come."""
    async with (
        gateways(nats_url),
        connect(nats_url, "test") as broker,
        running(jobs.service, jobs_settings(nats_url)),
    ):
        await eventually(lambda: _exists(broker))
        files = FileStore(broker)
        kept = await store(broker, "kept", b"k" * 600_000)
        deleted = await store(broker, "deleted", b"d" * 600_000)
        expired = await store(broker, "expired", b"e" * 600_000)
        await files.delete(deleted)
        await files.change(expired, lambda it: replace(it, expires_at=1))
        sweeper = FileSweeper(broker, Lease(broker, "test", "test", LeaseBucket(broker)))
        await sweeper.sweep()
        await sweeper.sweep()
        assert [await chunks_of(broker, each.id) for each in (kept, deleted, expired)] == [2, 0, 0]
        assert [each.id for each in await files.list("acme")] == ["kept"]


async def _exists(broker: Broker) -> bool:
    return await broker.request(broker.api_subject("STREAM.INFO.KV_files")) is not None


async def test_a_record_stays_until_no_more_chunks_can_come(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may still be sending the file when it is deleted."""
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        files = FileStore(broker)
        await files.delete(await store(broker, "deleted", b"d"))
        sweeper = FileSweeper(broker, Lease(broker, "test", "test", LeaseBucket(broker)))
        await sweeper.sweep()
        await broker.store(job_subjects.file_chunk("acme", "deleted", 1), b"late")
        await sweeper.sweep()
        assert await chunks_of(broker, "deleted") == 0
        assert await count_records(broker) == 1
        monkeypatch.setattr(file_sweeper, "KEPT_SECONDS", -1)
        await sweeper.sweep()
        assert await count_records(broker) == 0


async def test_parts_that_became_no_part_of_a_file_are_removed(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once nobody can be sending them any more; the file itself stays readable."""
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        files = FileStore(broker)
        await broker.store(job_subjects.file_chunk("acme", "torn", 0), b"torn")
        file = await store(broker, "kept", b"k", FilePart("torn"))
        monkeypatch.setattr(file_sweeper, "UPLOAD_SECONDS", -1)
        monkeypatch.setattr(file_sweeper, "KEPT_SECONDS", -1)
        sweeper = FileSweeper(broker, Lease(broker, "test", "test", LeaseBucket(broker)))
        await sweeper.sweep()
        found = await files.find("acme", "kept")
        assert found is not None
        assert found.unused == ()
        assert await chunks_of(broker, "torn") == 0
        assert b"".join([piece async for piece in files.read(file)]) == b"k"


async def count_records(broker: Broker) -> int:
    return (await broker.js.stream_info(topology.FILE_RECORDS)).state.messages


async def test_a_record_that_finds_no_room_is_swept_later(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full bucket is no reason for the batches and webhooks of all tenants to stop."""
    tries, expire = [], FileStore.expire

    async def find_no_room_at_first(self: FileStore, file: StoredFile) -> None:
        tries.append(file.id)
        if len(tries) == 1:
            raise StorageFull("the stream KV_files is full")
        await expire(self, file)

    monkeypatch.setattr(FileStore, "expire", find_no_room_at_first)
    monkeypatch.setattr(file_sweeper, "SWEEP_SECONDS", 0.1)
    async with (
        gateways(nats_url),
        connect(nats_url, "test") as broker,
        running(jobs.service, jobs_settings(nats_url)),
    ):
        await eventually(lambda: _exists(broker))
        expired = await store(broker, "expired", b"e")
        await FileStore(broker).change(expired, lambda it: replace(it, expires_at=1))

        async def is_removed() -> bool:
            return len(tries) > 1 and not await chunks_of(broker, "expired")

        await eventually(is_removed)

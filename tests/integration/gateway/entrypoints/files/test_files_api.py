"""`/v1/files` and `/v1/uploads` as the OpenAI SDK uses them, over a real broker."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from streams import job_subjects, topology
from streams.broker.broker_client import Broker
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, OTHER_KEY, RunningGateway, gateways, tenants

LINES = b'{"custom_id": "1", "body": {}}\n' * 40_000  # 1.2 MB: three chunks


def sdk(gateway: RunningGateway, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


@asynccontextmanager
async def stored_chunks(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as broker:
        yield broker


async def count_chunks(broker: Broker) -> int:
    return (await broker.js.stream_info(topology.FILES)).state.messages


async def test_a_file_is_stored_listed_read_and_deleted_at_any_gateway(nats_url: str) -> None:
    """What one gateway has answered is known to the others at once."""
    async with (
        gateways(nats_url, 2) as (first, second),
        sdk(first) as client,
        sdk(second) as other,
    ):
        file = await client.files.create(file=("in.jsonl", LINES), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(LINES), "in.jsonl", "batch")
        assert file.expires_at == file.created_at + 30 * 86400
        assert (await other.files.wait_for_processing(file.id)).status == "processed"
        content = await other.files.content(file.id)
        assert content.content == LINES
        assert [each.id async for each in other.files.list(purpose="batch")] == [file.id]
        assert [each.id async for each in other.files.list(purpose="evals")] == []
        assert (await other.files.delete(file.id)).deleted
        for gone in (client.files.retrieve(file.id), client.files.content(file.id)):
            with pytest.raises(openai.NotFoundError):
                await gone
        assert [each.id async for each in client.files.list()] == []


async def test_files_are_listed_in_pages_in_either_order(nats_url: str) -> None:
    """The SDK follows them to the end by itself."""
    async with gateways(nats_url) as (gateway,), sdk(gateway) as client:
        made = [
            (await client.files.create(file=(f"{n}.txt", b"x"), purpose="user_data")).id
            for n in range(5)
        ]
        pages = client.files.list(limit=2, order="asc")
        assert sorted([each.id async for each in pages]) == sorted(made)
        ascending = [each.id async for each in client.files.list(order="asc")]
        assert [each.id async for each in client.files.list(limit=2)] == ascending[::-1]


async def test_a_tenants_files_do_not_exist_for_another(nats_url: str) -> None:
    """404, as for an id that nobody has."""
    async with (
        gateways(nats_url) as (gateway,),
        sdk(gateway) as client,
        sdk(gateway, OTHER_KEY) as other,
    ):
        file = await client.files.create(file=("a.txt", b"secret"), purpose="user_data")
        for attempt in (
            other.files.retrieve(file.id),
            other.files.content(file.id),
            other.files.delete(file.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert [each.id async for each in other.files.list()] == []
        assert (await client.files.content(file.id)).content == b"secret"


async def test_an_upload_in_parts_becomes_one_file(nats_url: str) -> None:
    """Parts in the order of the completion, sent to any gateway; the MD5 is checked."""
    async with (
        gateways(nats_url, 2) as (first, second),
        sdk(first) as client,
        sdk(second) as other,
    ):
        upload = await client.uploads.create(
            filename="in.jsonl", purpose="batch", bytes=len(LINES), mime_type="text/jsonl"
        )
        half = len(LINES) // 2
        later = await other.uploads.parts.create(upload.id, data=LINES[half:])
        earlier = await client.uploads.parts.create(upload.id, data=LINES[:half])
        ids = [earlier.id, later.id]
        with pytest.raises(openai.BadRequestError, match="MD5"):
            await other.uploads.complete(upload.id, part_ids=ids, md5="0" * 32)
        with pytest.raises(openai.BadRequestError, match="bytes"):
            await other.uploads.complete(upload.id, part_ids=[earlier.id])
        digest = hashlib.md5(LINES).hexdigest()
        done = await other.uploads.complete(upload.id, part_ids=ids, md5=digest)
        again = await client.uploads.complete(upload.id, part_ids=ids)
        assert (done.status, again.status) == ("completed", "completed")
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == LINES
        with pytest.raises(openai.BadRequestError, match="completed"):
            await client.uploads.cancel(upload.id)


async def test_a_cancelled_upload_takes_no_parts_and_has_no_file(nats_url: str) -> None:
    """And its room is free for others at once."""
    small = tenants(max_stored_bytes=1000)
    async with gateways(nats_url, tenants=small) as (gateway,), sdk(gateway) as client:
        wanted = {"filename": "a.txt", "purpose": "user_data", "mime_type": "text/plain"}
        upload = await client.uploads.create(bytes=900, **wanted)  # type: ignore[arg-type]
        with pytest.raises(openai.PermissionDeniedError, match="900 bytes, of 1000"):
            await client.uploads.create(bytes=900, **wanted)  # type: ignore[arg-type]
        assert (await client.uploads.cancel(upload.id)).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            await client.uploads.parts.create(upload.id, data=b"late")
        await client.uploads.create(bytes=900, **wanted)  # type: ignore[arg-type]


async def test_an_upload_with_a_part_that_was_torn_is_completed_without_it(nats_url: str) -> None:
    """The client sends that part again under another id."""
    async with gateways(nats_url) as (gateway,), sdk(gateway) as client:
        upload = await client.uploads.create(
            filename="a.txt", purpose="user_data", bytes=4, mime_type="text/plain"
        )
        torn = await gateway.open(
            "POST",
            f"/v1/uploads/{upload.id}/parts",
            b'--b\r\nContent-Disposition: form-data; name="data"; filename="d"\r\n\r\nha',
            headers={"Content-Type": "multipart/form-data; boundary=b", "Content-Length": "500"},
        )
        torn.abort()
        part = await client.uploads.parts.create(upload.id, data=b"half")
        done = await client.uploads.complete(upload.id, part_ids=[part.id])
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == b"half"


async def test_a_client_that_leaves_leaves_no_file_behind(nats_url: str) -> None:
    """Its room is given back, though its bytes are removed later."""
    small = tenants(max_stored_bytes=3_000_000)
    async with (
        gateways(nats_url, tenants=small) as (gateway,),
        sdk(gateway) as client,
        stored_chunks(nats_url) as broker,
    ):
        leaving = await gateway.open(
            "POST",
            "/v1/files",
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
            + os.urandom(1_500_000),
            headers={
                "Content-Type": "multipart/form-data; boundary=b",
                "Content-Length": "2500000",
            },
        )
        await eventually(lambda: _has_chunks(broker))
        leaving.abort()

        async def fits() -> bool:
            try:
                await client.files.create(file=("b.txt", b"x" * 2_000_000), purpose="user_data")
            except openai.PermissionDeniedError:
                return False
            return True

        await eventually(fits)
        assert [each.filename async for each in client.files.list()] == ["b.txt"]


async def _has_chunks(broker: Broker) -> bool:
    return await count_chunks(broker) >= 2


@pytest.mark.parametrize(
    ("name", "data", "fields", "message"),
    [
        ("a.txt", b"x", {"purpose": "batch"}, "jsonl"),
        ("a.txt", b"x", {"purpose": "fun"}, "purpose is 'fun'"),
        ("a.txt", b"x", {}, "purpose is missing"),
        ("a.jsonl", b"", {"purpose": "batch"}, "empty"),
        ("a.txt", b"x", {"purpose": "user_data", "colour": "red"}, "colour"),
        (
            "a.txt",
            b"x",
            {"purpose": "user_data", "expires_after[anchor]": "created_at"},
            "expires_after",
        ),
        (
            "a.txt",
            b"x",
            {
                "purpose": "user_data",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "5",
            },
            "3600",
        ),
    ],
)
async def test_a_form_that_is_wrong_is_refused_and_nothing_is_kept(
    nats_url: str, name: str, data: bytes, fields: dict[str, str], message: str
) -> None:
    """The refusal names the field."""
    async with gateways(nats_url) as (gateway,), sdk(gateway) as client:
        with pytest.raises(openai.BadRequestError, match=message):
            await client.post(
                "/files",
                cast_to=object,
                body=fields,
                files={"file": (name, data)},
                options={"headers": {"Content-Type": "multipart/form-data"}},
            )
        assert [each.id async for each in client.files.list()] == []


async def test_a_file_that_is_too_large_is_refused(nats_url: str) -> None:
    """By its announced length before anything is read, else when it passes the limit."""
    async with gateways(nats_url, max_file_bytes=100_000) as (gateway,), sdk(gateway) as client:
        with pytest.raises(openai.APIStatusError, match="larger than the limit") as refused:
            await client.files.create(file=("a.txt", b"x" * 300_000), purpose="user_data")
        assert refused.value.status_code == 413
        with pytest.raises(openai.APIStatusError, match="larger than the limit"):
            await client.files.create(file=("a.txt", b"x" * 100_001), purpose="user_data")
        await client.files.create(file=("a.txt", b"x" * 100_000), purpose="user_data")


async def test_a_full_store_refuses_and_keeps_what_it_has(nats_url: str) -> None:
    """507: no other tenant's file was dropped for room."""
    async with (
        gateways(nats_url, files_bytes=2**20) as (gateway,),
        sdk(gateway) as client,
        sdk(gateway, OTHER_KEY) as other,
    ):
        kept = await client.files.create(file=("a.txt", b"x" * 500_000), purpose="user_data")
        with pytest.raises(openai.APIStatusError, match="full") as refused:
            await other.files.create(file=("b.txt", b"y" * 900_000), purpose="user_data")
        assert refused.value.status_code == 507
        assert (await client.files.content(kept.id)).content == b"x" * 500_000
        assert [each.id async for each in other.files.list()] == []


async def test_two_files_at_once_never_pass_the_quota_together(nats_url: str) -> None:
    """Whichever gateways they come to."""
    small = tenants(max_stored_bytes=500_000)
    async with (
        gateways(nats_url, 2, tenants=small) as found,
        sdk(found[0]) as first,
        sdk(found[1]) as second,
    ):
        sent = [
            client.files.create(file=("a.txt", b"x" * 200_000), purpose="user_data")
            for client in (first, second) * 3
        ]
        await asyncio.gather(*sent, return_exceptions=True)
        assert sum([each.bytes async for each in first.files.list()]) <= 500_000


async def test_a_lost_chunk_is_an_error_and_not_a_shorter_file(nats_url: str) -> None:
    """An operator may have purged the stream."""
    async with (
        gateways(nats_url) as (gateway,),
        sdk(gateway) as client,
        stored_chunks(nats_url) as broker,
    ):
        file = await client.files.create(file=("a.txt", b"x" * 10), purpose="user_data")
        await broker.purge(topology.FILES, job_subjects.ALL_FILES, 0)
        with pytest.raises(openai.InternalServerError, match="not in the broker's store"):
            await client.files.content(file.id)

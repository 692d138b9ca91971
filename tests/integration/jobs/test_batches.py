"""Batches from end to end: the OpenAI SDK against all services."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

import jobs.service
from jobs.batches.output_files import write_files
from registry.store import Registry
from streams import job_subjects
from streams.records.files.file_store import FileStore
from streams.records.jobs.batch_store import BatchStore
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, cell
from tests.support.services import jobs_settings, running

CHAT: Any = "/v1/chat/completions"  # the SDK has a type of its own for it


def sdk(gateway: RunningGateway, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def chat_line(index: int, **body: Any) -> dict[str, Any]:
    wanted = {"model": "mock", "messages": [{"role": "user", "content": f"line {index}"}]}
    return {
        "custom_id": f"id-{index}",
        "method": "POST",
        "url": CHAT,
        "body": {**wanted, "max_tokens": 8, "seed": 1, **body},
    }


def to_file(lines: list[Any]) -> tuple[str, bytes]:
    return "in.jsonl", b"".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
    )


@asynccontextmanager
async def jobs_cell(
    nats_url: str, window: int = 512, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        cell(nats_url, **options) as (gateway, *_),
        running(
            jobs.service,
            jobs_settings(nats_url, id="jobs-1", batch_window=window, **(settings or {})),
        ),
        sdk(gateway) as client,
    ):
        yield client


async def submit(
    client: openai.AsyncOpenAI, lines: list[Any], endpoint: Any = CHAT, **options: Any
) -> openai.types.Batch:
    file = await client.files.create(file=to_file(lines), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options
    )


async def ended(client: openai.AsyncOpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    found = batch

    async def has_ended() -> bool:
        nonlocal found
        found = await client.batches.retrieve(batch.id)
        return found.status in ("completed", "failed", "expired", "cancelled")

    await eventually(has_ended)
    return found


async def lines_of(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file)).text.splitlines()]


async def test_a_batch_of_chats_is_answered_in_order(nats_url: str) -> None:
    """Each line as the same request by itself would be, in the order of the input."""
    async with jobs_cell(nats_url) as client:
        lines = [chat_line(i) for i in range(30)]
        batch = await submit(client, lines, metadata={"made": "here"})
        assert batch.status == "validating"
        assert batch.output_file_id is None
        batch = await ended(client, batch)
        assert (batch.status, batch.model, batch.metadata) == (
            "completed",
            "mock",
            {"made": "here"},
        )
        assert batch.request_counts is not None
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
        assert batch.error_file_id is None
        output = await lines_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines]
        alone = await client.chat.completions.create(**lines[7]["body"])
        answer = output[7]["response"]["body"]
        assert output[7]["response"]["status_code"] == 200
        assert answer["choices"] == [alone.choices[0].model_dump(exclude_unset=True)]
        assert answer["usage"] == alone.usage.model_dump(exclude_unset=True)
        assert batch.usage is not None
        assert batch.usage.output_tokens == 30 * 8
        assert [each.id async for each in client.batches.list()] == [batch.id]


async def test_lines_that_their_endpoint_refuses_are_in_the_error_file(nats_url: str) -> None:
    """With the status that they would have got; the others are answered."""
    async with jobs_cell(nats_url) as client:
        lines = [
            chat_line(0),
            chat_line(1, model="nobody"),
            chat_line(2, max_tokens=10**9),
            chat_line(3, stream=True),
            chat_line(4),
        ]
        batch = await ended(client, await submit(client, lines))
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 3)
        output = await lines_of(client, batch.output_file_id)
        errors = await lines_of(client, batch.error_file_id)
        assert [line["custom_id"] for line in output] == ["id-0", "id-4"]
        assert [line["custom_id"] for line in errors] == ["id-1", "id-2", "id-3"]
        assert [line["response"]["status_code"] for line in errors] == [404, 400, 400]
        assert errors[0]["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([], ["empty_file"]),
        ([b"not json\n", chat_line(1)], ["invalid_json_line"]),
        ([chat_line(1), chat_line(1)], ["duplicate_custom_id"]),
        ([{**chat_line(1), "url": "/v1/embeddings"}], ["url_mismatch"]),
        ([{"custom_id": "x"}], ["url_mismatch"]),
        ([b"[1]\n", b"{}\n", chat_line(1)], ["invalid_json_line", "missing_required_parameter"]),
    ],
)
async def test_a_file_that_is_no_batch_fails_with_its_lines(
    nats_url: str, lines: list[Any], codes: list[str]
) -> None:
    """The batch is created, and then says which lines are wrong, and why."""
    async with jobs_cell(nats_url) as client:
        if lines:
            batch = await ended(client, await submit(client, lines))
        else:
            file = await client.files.create(file=("in.jsonl", b"\n \n"), purpose="batch")
            batch = await ended(
                client,
                await client.batches.create(
                    input_file_id=file.id, endpoint=CHAT, completion_window="24h"
                ),
            )
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [error.code for error in batch.errors.data or ()] == codes
        if lines:
            assert all(error.line for error in batch.errors.data or ())


@pytest.mark.parametrize(
    ("endpoint", "body", "check"),
    [
        ("/v1/completions", {"model": "mock", "prompt": "hi", "max_tokens": 4}, "choices"),
        ("/v1/embeddings", {"model": "vectors", "input": ["a", "b"]}, "data"),
    ],
)
async def test_other_endpoints_are_batched_too(
    nats_url: str, endpoint: str, body: dict[str, Any], check: str
) -> None:
    """Their lines have the bodies that these endpoints answer with."""
    async with jobs_cell(nats_url) as client:
        line = {"custom_id": "x", "method": "POST", "url": endpoint, "body": body}
        batch = await ended(client, await submit(client, [line], endpoint))
        (answer,) = await lines_of(client, batch.output_file_id)
        assert answer["response"]["body"][check]
        assert answer["response"]["body"]["model"] == body["model"]


async def test_a_cancelled_batch_accounts_for_every_line(nats_url: str) -> None:
    """What had ended is kept, the rest is in the error file."""
    slow = {"ttft_ms": 50, "itl_ms": 50}
    async with jobs_cell(nats_url, mock=slow) as client:
        batch = await submit(client, [chat_line(i, max_tokens=200) for i in range(600)])
        await eventually(lambda: _is_in_progress(client, batch.id))
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        batch = await ended(client, batch)
        assert batch.status == "cancelled"
        output = await lines_of(client, batch.output_file_id)
        errors = await lines_of(client, batch.error_file_id)
        assert sorted(line["custom_id"] for line in output + errors) == sorted(
            f"id-{i}" for i in range(600)
        )
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}


async def _is_in_progress(client: openai.AsyncOpenAI, batch: str) -> bool:
    return (await client.batches.retrieve(batch)).status == "in_progress"


async def test_a_batch_goes_on_at_another_jobs_service(nats_url: str) -> None:
    """One that stops in the middle loses, doubles and reorders nothing."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        async with running(jobs.service, jobs_settings(nats_url, id="jobs-1", batch_window=16)):
            batch = await submit(client, [chat_line(i) for i in range(300)])

            async def has_begun() -> bool:
                counts = (await client.batches.retrieve(batch.id)).request_counts
                return counts is not None and counts.completed > 20

            await eventually(has_begun)
        async with running(jobs.service, jobs_settings(nats_url, id="jobs-2")):
            batch = await ended(client, batch)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 300
        output = await lines_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [f"id-{i}" for i in range(300)]


async def test_results_are_read_while_the_batch_runs(nats_url: str) -> None:
    """All that have ended, in the order of the input, and one by its id."""
    async with jobs_cell(nats_url, mock={"ttft_ms": 20, "itl_ms": 20}) as client:
        lines = [chat_line(i, max_tokens=1 if i % 2 else 2000) for i in range(20)]
        batch = await submit(client, [*lines, chat_line(20, model="nobody")])

        async def read_results() -> list[str]:
            found = await client.get(f"/batches/{batch.id}/results", cast_to=httpx.Response)
            return [json.loads(line)["custom_id"] for line in found.text.splitlines()]

        wanted = [f"id-{i}" for i in range(1, 20, 2)]

        async def has_short_ones() -> bool:
            return await read_results() == [*wanted, "id-20"]

        await eventually(has_short_ones)
        assert (await read_item(client, batch.id, "id-0"))["status"] == "pending"
        short = await read_item(client, batch.id, "id-1")
        assert (short["status"], short["index"]) == ("completed", 1)
        assert short["result"]["response"]["status_code"] == 200
        assert (await read_item(client, batch.id, "id-20"))["status"] == "failed"
        with pytest.raises(openai.NotFoundError, match="id-99"):
            await read_item(client, batch.id, "id-99")
        await client.batches.cancel(batch.id)
        await ended(client, batch)


async def read_item(client: openai.AsyncOpenAI, batch: str, item: str) -> dict[str, Any]:
    found = await client.get(f"/batches/{batch}/items/{item}", cast_to=httpx.Response)
    read: dict[str, Any] = found.json()
    return read


async def test_a_paused_batch_goes_on_when_it_is_resumed(nats_url: str) -> None:
    """Nothing of it is published meanwhile."""
    async with jobs_cell(nats_url, 16, mock={"ttft_ms": 20, "itl_ms": 20}) as client:
        lines = [chat_line(i, max_tokens=20) for i in range(200)]
        batch = await submit(client, lines)
        await eventually(lambda: _has_completed(client, batch.id, 1))
        paused = await client.post(f"/batches/{batch.id}/pause", cast_to=httpx.Response)
        assert paused.json()["paused"]
        await eventually(lambda: _is_still(client, batch.id))
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        await client.post(f"/batches/{batch.id}/resume", cast_to=httpx.Response)
        batch = await ended(client, batch)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 200


async def _has_completed(client: openai.AsyncOpenAI, batch: str, count: int) -> bool:
    counts = (await client.batches.retrieve(batch)).request_counts
    return counts is not None and counts.completed >= count


async def _is_still(client: openai.AsyncOpenAI, batch: str) -> bool:
    """True if no line has ended within a second and a half, longer than a line takes."""
    before = (await client.batches.retrieve(batch)).request_counts
    await asyncio.sleep(1.5)
    return (await client.batches.retrieve(batch)).request_counts == before


async def test_a_batch_waits_for_its_time(nats_url: str) -> None:
    """`not_before` is ours: batches may be left for the night."""
    async with jobs_cell(nats_url) as client:
        begins = int(time.time()) + 3600
        batch = await submit(client, [chat_line(0)], extra_body={"not_before": begins})
        await eventually(lambda: _is_in_progress(client, batch.id))
        assert await _is_still(client, batch.id)
        assert batch.expires_at == begins + 86400
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch)).status == "cancelled"


async def test_a_record_that_cannot_be_read_holds_no_other_batch_up(nats_url: str) -> None:
    """A gateway or a jobs service that was stolen, or a newer release, may write anything."""
    async with jobs_cell(nats_url) as client, connect(nats_url, "test") as broker:
        for number, data in enumerate((b"adversary", b"", b"\x80", b"\xc0")):
            subject = job_subjects.batch_record("acme", f"{number:024x}")
            await broker.store(subject, data)
        batch = await ended(client, await submit(client, [chat_line(0)]))
        assert batch.status == "completed"
        assert [each.id async for each in client.batches.list()] == [batch.id]
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(f"batch_{0:024x}")


async def test_files_of_an_ended_batch_are_written_again_as_they_were(nats_url: str) -> None:
    """The service that wrote them may die before the batch says so; the next one does the same."""
    async with jobs_cell(nats_url) as client, connect(nats_url, "test") as broker:
        told = await ended(client, await submit(client, [chat_line(0)]))
        (batch,) = await BatchStore(broker).list_of("acme")
        source = await FileStore(broker).find("acme", batch.input_file)
        assert source
        registry = await Registry.open(broker)
        for _ in range(2):
            again = await write_files(broker, registry, batch, source)
            assert (f"file-{again.output.id}", again.error.id) == (told.output_file_id, "")
        await registry.close()
        assert len(await lines_of(client, told.output_file_id)) == 1

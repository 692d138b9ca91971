"""Options of batches beside OpenAI's: room, hours, estimates and retries."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest

from registry.store import Registry
from streams.records.jobs.batch_store import BatchStore
from tests.integration.jobs.test_batches import (
    CHAT,
    _is_in_progress,
    _is_still,
    chat_line,
    ended,
    jobs_cell,
    lines_of,
    submit,
    to_file,
)
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import OTHER_KEY

MIB = 2**20


async def post(client: openai.AsyncOpenAI, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, body=body, cast_to=httpx.Response)
    found: dict[str, Any] = answer.json()
    return found


async def test_a_batch_whose_results_may_find_no_room_is_refused(nats_url: str) -> None:
    """Its bytes are promised when it is created, and others get them when it has ended."""
    async with (
        jobs_cell(nats_url, results_bytes=MIB, mock={"ttft_ms": 500, "itl_ms": 500}) as client,
        connect(nats_url, "test") as broker,
    ):
        lines = [chat_line(i, max_tokens=400) for i in range(200)]  # 8 bytes for each token
        first = await submit(client, lines)
        stored = await BatchStore(broker).find("acme", first.id.removeprefix("batch_"))
        assert stored
        assert stored.reserved_bytes == 200 * (512 + 400 * 8)
        with pytest.raises(openai.APIStatusError) as refused:
            await submit(client, lines)
        assert (refused.value.status_code, refused.value.code) == (507, "storage_full")
        assert "max_tokens" in refused.value.message
        assert [each.id async for each in client.batches.list()] == [first.id]
        await client.batches.cancel(first.id)
        await ended(client, first)
        second = await submit(client, lines)
        await client.batches.cancel(second.id)
        await ended(client, second)


async def test_failed_lines_are_retried_as_a_new_batch(nats_url: str) -> None:
    """Under the ids that they had; the others are not run again."""
    async with jobs_cell(nats_url) as client:
        lines = [chat_line(i, model="mock" if i % 3 else "later") for i in range(9)]
        batch = await ended(client, await submit(client, lines))
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (6, 3)
        async with connect(nats_url, "operator") as broker:
            registry = await Registry.open(broker)
            await registry.set_alias("later", "mock")
            await registry.close()
        await eventually(lambda: _is_offered(client, "later"))
        made = await post(client, f"/batches/{batch.id}/retry", {"metadata": {"again": "1"}})
        assert (made["retry_of"], made["metadata"]) == (batch.id, {"again": "1"})
        again = await ended(client, await client.batches.retrieve(made["id"]))
        assert again.status == "completed"
        output = await lines_of(client, again.output_file_id)
        assert [line["custom_id"] for line in output] == ["id-0", "id-3", "id-6"]
        good = await ended(client, await submit(client, [chat_line(0)]))
        with pytest.raises(openai.BadRequestError, match="no failed lines"):
            await post(client, f"/batches/{good.id}/retry", {})


async def _is_offered(client: openai.AsyncOpenAI, model: str) -> bool:
    try:
        await client.models.retrieve(model)
    except openai.NotFoundError:
        return False
    return True


async def test_a_batch_is_estimated_before_it_runs(nats_url: str) -> None:
    """At most by what its lines ask for; what is expected is as in the last like batch."""
    async with jobs_cell(nats_url) as client, connect(nats_url, "test") as broker:
        lines = [chat_line(i, max_tokens=8) for i in range(50)]
        file = await client.files.create(file=to_file(lines), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": CHAT}
        before = await post(client, "/batches/estimate", asked)
        assert (before["lines"], before["models"]) == (50, {"mock": 50})
        assert before["completion_tokens"] == {"expected": None, "at_most": 400}
        assert before["seconds"] is None
        assert before["unusable_lines"] == 0
        batch = await ended(client, await submit(client, lines))
        assert batch.usage is not None
        assert before["prompt_tokens"] == pytest.approx(batch.usage.input_tokens, rel=0.05)
        after = await post(client, "/batches/estimate", asked)
        assert after["completion_tokens"] == {"expected": 400, "at_most": 400}
        assert after["seconds"] > 0
        assert batch.id in after["basis"]
        assert after["result_bytes"]["at_most"] == 50 * (512 + 8 * 8)
        stored = await BatchStore(broker).find("acme", batch.id.removeprefix("batch_"))
        assert stored
        assert 0 < stored.stored_bytes <= stored.reserved_bytes


async def test_a_batch_runs_in_its_hours_alone(nats_url: str) -> None:
    """No line is published before; hours that its window does not reach are refused."""
    async with jobs_cell(nats_url) as client:
        now = datetime.now(UTC)
        later = [f"{now + timedelta(hours=h):%H:%M}" for h in (3, 4)]
        batch = await submit(client, [chat_line(0)], extra_body={"run_between": later})
        await eventually(lambda: _is_in_progress(client, batch.id))
        assert await _is_still(client, batch.id)
        await client.batches.cancel(batch.id)
        await ended(client, batch)
        around = [f"{now + timedelta(hours=h):%H:%M}" for h in (-1, 3)]
        hours = {"run_between": around, "time_zone": "UTC"}
        batch = await submit(client, [chat_line(0)], extra_body=hours)
        assert (await ended(client, batch)).status == "completed"
        file = await client.files.create(file=to_file([chat_line(0)]), purpose="batch")
        short: Any = "1h"
        with pytest.raises(openai.BadRequestError, match="over before"):
            await client.batches.create(
                input_file_id=file.id,
                endpoint=CHAT,
                completion_window=short,
                extra_body={"run_between": later},
            )
        with pytest.raises(openai.BadRequestError, match="Mars"):
            await submit(client, [chat_line(0)], extra_body={**hours, "time_zone": "Mars"})


async def test_an_idempotency_key_stands_for_one_batch(nats_url: str) -> None:
    """Also if it is used twice at once, as by a client that did not wait for the answer."""
    async with jobs_cell(nats_url) as client:
        file = await client.files.create(file=to_file([chat_line(0)]), purpose="batch")
        wanted: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        headers = {"Idempotency-Key": "nightly"}
        made = await asyncio.gather(
            *(client.batches.create(**wanted, extra_headers=headers) for _ in range(3))
        )
        again = await client.batches.create(**wanted, extra_headers=headers)
        assert {batch.id for batch in made} == {again.id}
        other = await client.batches.create(**wanted, extra_headers={"Idempotency-Key": "other"})
        assert other.id != again.id
        with pytest.raises(openai.ConflictError, match="of another file or for another endpoint"):
            await client.batches.create(
                **{**wanted, "endpoint": "/v1/completions"}, extra_headers=headers
            )
        stranger = client.with_options(api_key=OTHER_KEY)
        with pytest.raises(openai.NotFoundError):
            await stranger.batches.create(**wanted, extra_headers=headers)


@pytest.mark.parametrize("year", [2090, 30_000_000])
async def test_a_batch_that_would_outlive_its_file_is_refused(nats_url: str, year: int) -> None:
    """Also where no clock goes so far, with hours or without."""
    async with jobs_cell(nats_url) as client:
        late = {"not_before": (year - 1970) * 31_556_952}
        for hours in ({}, {"run_between": ["22:00", "06:00"]}):
            with pytest.raises(openai.BadRequestError, match="not_before|expires at"):
                await submit(client, [chat_line(0)], extra_body={**late, **hours})


async def test_another_tenants_batch_and_file_are_not_found(nats_url: str) -> None:
    """Every path answers as if there were none."""
    async with jobs_cell(nats_url) as client:
        batch = await ended(client, await submit(client, [chat_line(0, model="nobody")]))
        other = client.with_options(api_key=OTHER_KEY)
        for path in ("results", "items/id-0"):
            with pytest.raises(openai.NotFoundError):
                await other.get(f"/batches/{batch.id}/{path}", cast_to=httpx.Response)
        for path in ("retry", "cancel", "pause", "resume"):
            with pytest.raises(openai.NotFoundError):
                await post(other, f"/batches/{batch.id}/{path}", {})
        asked = {"input_file_id": batch.input_file_id, "endpoint": CHAT}
        with pytest.raises(openai.NotFoundError):
            await post(other, "/batches/estimate", asked)
        assert [each.id async for each in other.batches.list()] == []
        mine = sorted([file.purpose async for file in client.files.list()])
        assert mine == ["batch", "batch_output"]

"""Results that no worker of ours would write: whoever has its rights may write anything."""

import pytest

from streams import job_subjects
from streams.records.jobs.batch_store import BatchStore
from tests.integration.jobs.test_batches import chat_line, ended, jobs_cell, lines_of, submit
from tests.support.accounts_server import connect
from tests.support.eventually import eventually

SLOW = {"ttft_ms": 1, "itl_ms": 50}


@pytest.mark.parametrize("payload", [b"\xc1", b"\x80"])
async def test_a_batch_ends_with_the_results_that_can_be_read(
    nats_url: str, payload: bytes
) -> None:
    """A line has failed if its own cannot, and what is of no line counts for nothing."""
    lines = [chat_line(0, max_tokens=300), chat_line(1)]
    async with (
        jobs_cell(nats_url, mock=SLOW) as client,
        connect(nats_url, "test") as broker,
    ):
        batch = await submit(client, lines)
        job = batch.id.removeprefix("batch_")
        for index in (0, 10**6):
            await broker.store(job_subjects.result("acme", job, index), payload)

        async def is_counted() -> bool:
            found = await BatchStore(broker).find("acme", job)
            return bool(found and (found.completed, found.failed) == (1, 1))

        await eventually(is_counted)
        batch = await ended(client, batch)
        assert batch.status == "completed"
        (failed,) = await lines_of(client, batch.error_file_id)
        assert failed["custom_id"] == "id-0"
        (done,) = await lines_of(client, batch.output_file_id)
        assert done["custom_id"] == "id-1"

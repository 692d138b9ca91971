"""Lines of output and lines of errors are the lines of the input, whatever a batch's end."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from streams.broker.broker_client import Broker
from streams.records.jobs.batch_store import BatchStore
from tests.integration.jobs.test_batches import chat_line, ended, lines_of, sdk, submit
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import cell
from tests.support.keys import Operator, operator, pepper_file
from tests.support.service_process import service_process

LINES = 200
SLOW = {"ttft_ms": 20, "itl_ms": 20}
EndBatch = Callable[["Ending"], Awaitable[object]]


class Ending:
    """A batch that runs, and who may end it."""

    def __init__(
        self, client: openai.AsyncOpenAI, broker: Broker, owner: Operator, key: str, batch: str
    ) -> None:
        self.client, self.broker, self.owner, self.key = client, broker, owner, key
        self.batch = batch

    async def cancel(self) -> None:
        await self.client.batches.cancel(self.batch)

    async def expire(self) -> None:
        store, now = BatchStore(self.broker), int(self.broker.clock.now())
        batch = await store.find("acme", self.batch.removeprefix("batch_"))
        assert batch
        await store.change(batch, lambda it: replace(it, expires_at=now))

    async def revoke_key(self) -> None:
        await self.owner.keys.revoke(self.key, self.owner.now)


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (Ending.cancel, "cancelled", "batch_cancelled"),
        (Ending.expire, "expired", "batch_expired"),
        (Ending.revoke_key, "failed", "batch_refused"),
    ],
)
async def test_every_line_is_in_a_file(
    nats_url: str, tmp_path: Path, end: EndBatch, status: str, code: str, is_killed: bool
) -> None:
    """Once, in order, and as the counts say, also if its jobs service is killed meanwhile."""
    async with (
        cell(nats_url, mock=SLOW, key_pepper_file=pepper_file(tmp_path)) as (gateway,),
        operator(nats_url) as owner,
        sdk(gateway) as client,
        connect(nats_url, "test") as broker,
    ):
        key, record = await owner.create(scopes=("jobs", "infer"))
        lines, log = [chat_line(i, max_tokens=20) for i in range(LINES)], tmp_path / "jobs.log"
        async with sdk(gateway, key) as holder:
            await eventually(lambda: _is_known(holder))
            batch = await submit(holder, lines)
        with service_process("jobs", nats_url, log, batch_window=32) as service:
            await eventually(lambda: _has_completed(client, batch.id, 40))
            await end(Ending(client, broker, owner, record.id, batch.id))
            if not is_killed:
                batch = await ended(client, batch)
            service.kill()
        with service_process("jobs", nats_url, log):
            batch = await ended(client, batch)
        await _check(client, batch, status, code)


async def _is_known(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.batches.list()
    except openai.AuthenticationError:
        return False
    return True


async def _has_completed(client: openai.AsyncOpenAI, batch: str, count: int) -> bool:
    counts = (await client.batches.retrieve(batch)).request_counts
    return counts is not None and counts.completed >= count


async def _check(
    client: openai.AsyncOpenAI, batch: openai.types.Batch, status: str, code: str
) -> None:
    assert batch.status == status
    output = await lines_of(client, batch.output_file_id)
    errors = await lines_of(client, batch.error_file_id)
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (LINES, len(output), len(errors))
    wanted = [f"id-{i}" for i in range(LINES)]
    assert sorted(line["custom_id"] for line in output + errors) == sorted(wanted)
    for lines in (output, errors):
        places = [wanted.index(line["custom_id"]) for line in lines]
        assert places == sorted(places)
    assert {line["error"]["code"] for line in errors} == {code}
    found = await client.get(f"/batches/{batch.id}/results", cast_to=httpx.Response)
    assert len(found.text.splitlines()) == LINES  # both files in one

"""REQUESTS is deleted beneath batches and background responses: what was queued runs all the same.

Only the jobs service knows of a request that was deleted before any dispatcher had read it; by its
deadline alone it would wait for ten minutes.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
from nats.js.errors import NotFoundError

import dispatcher.service
import gpu_worker.service
import jobs.service
from streams import subjects, topology
from streams.broker.broker_client import Broker
from streams.messages import LedgerRecord
from tests.integration.jobs.test_batches import chat_line, ended, jobs_cell, lines_of, sdk, submit
from tests.integration.responses.test_background import ended as response_ended
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import gateways, register
from tests.support.services import dispatcher_settings, jobs_settings, running, worker_settings

LINES = 20


@asynccontextmanager
async def queueing(nats_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of services that queue requests; nobody dispatches them."""
    await register(nats_url)
    async with (
        gateways(nats_url) as (gateway,),
        running(jobs.service, jobs_settings(nats_url, id="jobs-1")),
        sdk(gateway) as client,
    ):
        yield client


@asynccontextmanager
async def serving(nats_url: str) -> AsyncIterator[None]:
    async with (
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        yield


async def replace_queue(broker: Broker, queued: int) -> None:
    """Delete REQUESTS, with so many requests in it, and wait until as many are in the new one."""
    await eventually(lambda: _holds(broker, queued))
    await broker.js.delete_stream(topology.REQUESTS)
    await eventually(lambda: _holds(broker, queued))


async def _holds(broker: Broker, queued: int) -> bool:
    try:
        info = await broker.js.stream_info(topology.REQUESTS)
    except NotFoundError:  # it is being made again
        return False
    return info.state.messages == queued


async def test_lines_that_were_deleted_in_the_queue_are_queued_again(nats_url: str) -> None:
    """As the same tries: each is answered."""
    async with queueing(nats_url) as client, connect(nats_url, "test") as broker:
        batch = await submit(client, [chat_line(i) for i in range(LINES)])
        await replace_queue(broker, LINES)
        async with serving(nats_url):
            batch = await ended(client, batch)
        output = await lines_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [f"id-{i}" for i in range(LINES)]


async def test_a_background_response_that_was_deleted_in_the_queue_is_queued_again(
    nats_url: str,
) -> None:
    async with queueing(nats_url) as client, connect(nats_url, "test") as broker:
        made = await client.responses.create(
            model="mock", input="hi", max_output_tokens=8, background=True
        )
        await replace_queue(broker, 1)
        async with serving(nats_url):
            assert (await response_ended(client, made.id)).usage.output_tokens == 8


async def test_a_background_response_that_a_dispatcher_has_lost_is_queued_again(
    nats_url: str,
) -> None:
    """The dispatcher ends its request as lost; no worker has begun, so the response goes on."""
    async with (
        queueing(nats_url) as client,
        connect(nats_url, "test") as broker,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        made = await client.responses.create(
            model="mock", input="hi", max_output_tokens=8, background=True
        )
        await eventually(lambda: _is_read(broker))
        await broker.js.delete_stream(topology.REQUESTS)
        await eventually(lambda: _is_ended(broker))
        async with running(gpu_worker.service, worker_settings(nats_url)):
            assert (await response_ended(client, made.id)).usage.output_tokens == 8


async def _is_read(broker: Broker) -> bool:
    found = await broker.js.consumers_info(topology.REQUESTS)
    return any(consumer.num_ack_pending for consumer in found)


async def _is_ended(broker: Broker) -> bool:
    found = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
    return [LedgerRecord.unpack(message.data).outcome for message in found] == ["work_lost"]


async def test_lines_that_run_are_not_computed_again(nats_url: str) -> None:
    """They are published again, too, and recognised by whoever has them."""
    slow = {"ttft_ms": 1, "itl_ms": 20}
    async with (
        jobs_cell(nats_url, mock=slow) as client,
        connect(nats_url, "test") as broker,
    ):
        batch = await submit(client, [chat_line(i, max_tokens=200) for i in range(LINES)])
        logs = topology.token_stream_name(subjects.ITEM_SHARD)

        async def all_run() -> bool:
            info = await broker.js.stream_info(logs, subjects_filter=">")
            return len(info.state.subjects or {}) == LINES

        await eventually(all_run)
        await broker.js.delete_stream(topology.REQUESTS)
        batch = await ended(client, batch)
        assert len(await lines_of(client, batch.output_file_id)) == LINES

        async def outcomes() -> list[str]:
            found = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
            return [LedgerRecord.unpack(message.data).outcome for message in found]

        async def all_billed() -> bool:
            return len(await outcomes()) >= LINES

        await eventually(all_billed)
        assert await outcomes() == ["length"] * LINES

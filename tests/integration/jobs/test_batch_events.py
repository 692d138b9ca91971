"""Events of batches: stored once for each end, whatever dies in between."""

import time
from dataclasses import replace

import orjson
import pytest

from api.batch_bodies import batch_id
from jobs import service
from streams import job_subjects, topology
from streams.broker.broker_client import Broker
from streams.records.jobs.batch_records import Batch, BatchStatus
from streams.records.jobs.batch_store import BatchStore
from streams.records.webhooks.event_outbox import store_event
from streams.records.webhooks.events import EventType, WebhookEvent
from tests.integration.jobs.test_batches import chat_line, ended, jobs_cell, submit
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import gateways
from tests.support.services import jobs_settings, running


async def events(broker: Broker) -> list[tuple[str, str]]:
    """Type and object of each event, in order."""
    found = await broker.read_subject(topology.WEBHOOKS, job_subjects.ALL_EVENTS)
    bodies = [orjson.loads(message.data) for message in found]
    return [(body["type"], body["data"]["id"]) for body in bodies]


async def test_each_end_of_a_batch_is_an_event(nats_url: str) -> None:
    """The event names the batch as clients know it, when its last status can be read."""
    async with jobs_cell(nats_url) as client, connect(nats_url, "test") as broker:
        done = await ended(client, await submit(client, [chat_line(0)]))
        wrong = await ended(client, await submit(client, [b"no line\n"]))
        tomorrow = int(time.time()) + 86_400
        waiting = await submit(client, [chat_line(0)], extra_body={"not_before": tomorrow})
        await client.batches.cancel(waiting.id)
        await ended(client, waiting)
        wanted = [
            ("batch.completed", done.id),
            ("batch.failed", wrong.id),
            ("batch.cancelled", waiting.id),
        ]

        async def are_stored() -> bool:
            return await events(broker) == wanted

        await eventually(are_stored)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_process_that_died_before_the_event_loses_and_doubles_none(
    nats_url: str, is_stored: bool
) -> None:
    """It has stored the last status and then, or not, the event: the next one finishes that."""
    async with gateways(nats_url), connect(nats_url, "test") as broker:
        batches = BatchStore(broker)
        batch = Batch("acme", "0" * 24, "/v1/embeddings", "1" * 24, 60, 1, 61, b"secret")
        batch = await batches.create(batch.at_status(BatchStatus.EXPIRED, 61))
        event = WebhookEvent("acme", EventType.BATCH_EXPIRED, batch_id(batch))
        if is_stored:
            await store_event(broker, event)
        old = replace(batch, id="2" * 24, revision=0, event_due=False)
        await batches.create(old)
        async with running(service, jobs_settings(nats_url, id="jobs-1")):

            async def is_over() -> bool:
                found = await batches.find("acme", batch.id)
                return bool(found and found.is_over)

            await eventually(is_over)
        assert await events(broker) == [("batch.expired", event.object_id)]

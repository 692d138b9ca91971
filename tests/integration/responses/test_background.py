"""Responses in the background: they outlive client and gateway, and are read from any number on."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest

import dispatcher.service
import gpu_worker.service
import jobs.service
from api.responses.response_bodies import parse_response_id
from jobs.responses import background_responses
from streams import job_subjects, topology
from streams.broker.broker_client import Broker
from streams.records.responses.response_store import ResponseStore
from tests.integration.jobs.test_batches import jobs_cell
from tests.integration.responses.test_responses_sdk import sdk
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import OTHER_KEY, RunningGateway, cell, gateways, register
from tests.support.services import (
    dispatcher_settings,
    jobs_settings,
    running,
    worker_settings,
)
from tests.support.webhook_receiver import LOOPBACK, webhook_receiver

SLOW = {"ttft_ms": 1, "itl_ms": 20}


@asynccontextmanager
async def background_cell(
    nats_url: str, count: int = 2, **mock: float
) -> AsyncIterator[list[RunningGateway]]:
    async with (
        cell(nats_url, count, mock=mock) as found,
        running(jobs.service, jobs_settings(nats_url, id="jobs-1")),
    ):
        yield found


async def status_of(client: openai.AsyncOpenAI, response: str) -> str | None:
    return (await client.responses.retrieve(response)).status


async def ended(client: openai.AsyncOpenAI, response: str) -> Any:
    async def has_ended() -> bool:
        return await status_of(client, response) not in ("queued", "in_progress")

    await eventually(has_ended)
    return await client.responses.retrieve(response)


async def events_from(
    client: openai.AsyncOpenAI, response: str, after: int | None = None
) -> list[dict[str, Any]]:
    told = openai.omit if after is None else after
    stream = await client.responses.retrieve(response, stream=True, starting_after=told)
    return [event.to_dict() async for event in stream]


async def purge_logs(broker: Broker) -> None:
    """Remove token logs, as their age would."""
    await broker.purge(topology.token_stream_name(0), None, 0)


async def test_a_background_response_streams_and_resumes_at_another_gateway(nats_url: str) -> None:
    """The same events with the same numbers: live, from the log, and when the log is gone."""
    async with (
        background_cell(nats_url, **SLOW) as (first, second),
        sdk(first) as client,
        sdk(second) as other,
        connect(nats_url, "test") as broker,
    ):
        stream = await client.responses.create(
            model="mock",
            input="hi",
            max_output_tokens=60,
            background=True,
            stream=True,
            include=["message.output_text.logprobs"],
        )
        seen: list[dict[str, Any]] = []
        async for event in stream:
            seen.append(event.to_dict())
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        response = seen[0]["response"]["id"]
        assert seen[0]["response"]["status"] == "queued"
        live = await events_from(other, response, seen[-1]["sequence_number"])
        whole = [*seen, *live]
        assert whole[-1]["type"] == "response.incomplete"
        numbers = [event["sequence_number"] for event in whole]
        assert numbers == sorted(set(numbers))
        assert await events_from(client, response) == whole
        await purge_logs(broker)
        assert await events_from(other, response) == whole
        for at in (0, 3, 7, len(whole) - 2):
            after = whole[at]["sequence_number"]
            assert await events_from(client, response, after) == whole[at + 1 :]
        shown = await client.responses.retrieve(response)
        assert shown.to_dict() == whole[-1]["response"]


async def test_a_delta_has_the_number_of_its_last_token(nats_url: str) -> None:
    """4 more than its index: a function of the log alone."""
    async with background_cell(nats_url, 1, **SLOW) as (gateway,), sdk(gateway) as client:
        made = await client.responses.create(
            model="mock", input="hi", max_output_tokens=20, background=True
        )
        await ended(client, made.id)
        deltas = [
            event
            for event in await events_from(client, made.id)
            if event["type"] == "response.output_text.delta"
        ]
        assert deltas[0]["sequence_number"] >= 4
        assert deltas[-1]["sequence_number"] == 4 + 20 - 1


async def test_a_background_response_is_cancelled_and_deleted(nats_url: str) -> None:
    """A cancelled one says so for ever; what was not in the background cannot be cancelled."""
    async with (
        background_cell(nats_url, 1, **SLOW) as (gateway,),
        sdk(gateway) as client,
        connect(nats_url, "test") as broker,
    ):
        made = await client.responses.create(
            model="mock", input="hi", max_output_tokens=5000, background=True
        )
        assert made.status == "queued"

        async def has_begun() -> bool:
            return await status_of(client, made.id) == "in_progress"

        await eventually(has_begun)
        cancelled = await client.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        events = await events_from(client, made.id)
        assert events[-1]["type"] == "response.cancelled"
        foreground = await client.responses.create(model="mock", input="hi", max_output_tokens=4)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(foreground.id)
        for response in (made.id, foreground.id):
            await client.responses.delete(response)

        async def is_removed() -> bool:
            found = await broker.read_subject(topology.RESPONSES, "$KV.responses.>")
            results = await broker.read_subject(topology.RESULTS, job_subjects.ALL_RESULTS)
            return not found and not results

        await eventually(is_removed)


async def test_a_background_response_waits_for_a_worker_beyond_its_deadline(nats_url: str) -> None:
    """A deadline that passes in the queue is no try: it is queued again, under another id."""
    await register(nats_url)
    async with (
        gateways(nats_url) as (gateway,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(jobs.service, jobs_settings(nats_url, id="jobs-1")),
        sdk(gateway) as client,
        connect(nats_url, "test") as broker,
    ):
        made = await client.responses.create(
            model="mock",
            input="hi",
            max_output_tokens=8,
            background=True,
            extra_body={"deadline_ms": 300},
        )

        async def has_passed_twice() -> bool:
            found = await broker.read_subject(topology.RESULTS, job_subjects.ALL_RESULTS)
            return len(found) >= 2

        await eventually(has_passed_twice)
        assert await status_of(client, made.id) == "queued"
        await give_time(broker, made.id)
        async with running(gpu_worker.service, worker_settings(nats_url)):
            response = await ended(client, made.id)
            assert (response.status, response.usage.output_tokens) == ("incomplete", 8)


async def test_a_tenant_whose_responses_wait_holds_nobody_else_up(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant has a part of the room, and its others wait."""
    monkeypatch.setattr(background_responses, "MAX_OF_TENANT", 1)
    asked: dict[str, Any] = {"model": "mock", "input": "hi", "background": True}
    async with (
        background_cell(nats_url, 1, **SLOW) as (gateway,),
        sdk(gateway) as client,
        sdk(gateway, OTHER_KEY) as other,
    ):
        long = await client.responses.create(**asked, max_output_tokens=5000)

        async def has_begun() -> bool:
            return await status_of(client, long.id) == "in_progress"

        await eventually(has_begun)
        waiting = await client.responses.create(**asked, max_output_tokens=4)
        others = await other.responses.create(**asked, max_output_tokens=4)
        assert (await ended(other, others.id)).status == "incomplete"
        assert await status_of(client, waiting.id) == "queued"
        await client.responses.cancel(long.id)
        assert (await ended(client, waiting.id)).status == "incomplete"


async def test_a_note_that_comes_while_another_is_worked_on_stays(nats_url: str) -> None:
    """A response that is deleted as it ends is still removed."""
    async with (
        cell(nats_url) as (gateway,),
        sdk(gateway) as client,
        connect(nats_url, "test") as broker,
    ):
        made = await client.responses.create(model="mock", input="hi", background=True)
        store, name = ResponseStore(broker), parse_response_id(made.id)
        first = await store.find_pending("acme", name)
        await client.responses.delete(made.id)
        await store.unmark_pending("acme", name, first)
        assert await store.list_pending() == [("acme", name)]
        await store.unmark_pending("acme", name, await store.find_pending("acme", name))
        assert await store.list_pending() == []
        assert await store.find_pending("acme", name) == 0


async def give_time(broker: Broker, response: str) -> None:
    """Take the deadline off a response, which this machine may not meet once a worker begins."""
    store = ResponseStore(broker)
    found = await store.find("acme", parse_response_id(response))
    assert found
    body = {k: v for k, v in json.loads(found.body).items() if k != "deadline_ms"}
    changed = await store.change(found, lambda it: replace(it, body=json.dumps(body).encode()))
    assert changed
    late = changed.attempt  # has it still

    async def is_queued_again() -> bool:
        newest = await store.find("acme", changed.id)
        return newest is not None and newest.attempt > late

    await eventually(is_queued_again)


async def test_the_end_of_a_background_response_is_told_to_webhooks(nats_url: str) -> None:
    """Once, after it can be read; that of any other response is not."""
    async with (
        webhook_receiver() as receiver,
        jobs_cell(
            nats_url, settings={"webhook_network": LOOPBACK}, webhook_network=LOOPBACK
        ) as client,
    ):
        endpoint = await client.webhooks.create(
            name="ours",
            url=receiver.url,
            event_types=["response.completed", "response.incomplete", "response.failed"],
        )
        asked: dict[str, Any] = {"model": "mock", "input": "hi", "max_output_tokens": 4}
        await client.responses.create(**asked)
        made = await client.responses.create(**asked, background=True)
        await eventually(lambda: receiver.received)
        (webhook,) = receiver.received
        event: Any = client.webhooks.unwrap(
            webhook.body, webhook.headers, secret=endpoint.signing_secret
        )
        assert (event.type, event.data.id) == ("response.incomplete", made.id)
        assert await status_of(client, made.id) == "incomplete"

"""Webhooks from end to end: the OpenAI SDK, and its own and another verifier of what arrives."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, cast

import httpx
import openai
import pytest
from standardwebhooks import Webhook, WebhookVerificationError

import jobs.service
from streams import job_subjects, messages
from streams.broker.broker_client import Broker
from streams.records.quota_thresholds import QuotaThreshold
from streams.records.webhooks.delivery_records import WebhookDelivery
from streams.records.webhooks.endpoint_records import WebhookEndpoint
from streams.records.webhooks.event_outbox import store_event
from streams.records.webhooks.events import EventType, WebhookEvent, event_id
from tests.integration.jobs.test_batches import chat_line, ended, jobs_cell, sdk, submit
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import OTHER_KEY, RunningGateway, gateways
from tests.support.services import jobs_settings, running
from tests.support.webhook_receiver import (
    LOOPBACK,
    ReceivedWebhook,
    WebhookReceiver,
    webhook_receiver,
)

ENDED: Any = ["batch.completed", "batch.failed"]  # the SDK has a type of its own for them
THRESHOLD: Any = ["quota.threshold_reached"]
UNCALLED = [
    "http://example.com/hook",
    "https://127.0.0.1/hook",
    "https://localhost/hook",
    "https://10.1.2.3/hook",
    "https://[::1]/hook",
    "https://169.254.169.254/latest",
    "https://2130706433/",
    "https://user:secret@example.com/",
    "ftp://example.com/",
    "https://exa mple.com/",
    "nothing",
]
SOON = (0.05, 0.05, 0.05)
NO_ENDPOINT = WebhookEndpoint(
    "acme",
    "broken",
    name="broken",
    url="https://h.example/",
    event_types=("batch.completed",),
    created_at=cast(int, "yesterday"),
    updated_at=0,
)
NO_DELIVERY = WebhookDelivery(
    "acme", "broken", "evt_broken", "batch.completed", b"{}", 0, cast(float, "soon")
)
NO_EVENT = b'{"id": "EVT >", "type": "batch.completed", "created_at": 9999999999}'


@dataclass(frozen=True)
class WebhookCell:
    """A gateway and a jobs service that tries webhooks again soon."""

    gateway: RunningGateway
    client: openai.AsyncOpenAI
    broker: Broker

    async def note(self, kind: EventType = EventType.BATCH_COMPLETED) -> str:
        """Store an event, and return its id."""
        event = WebhookEvent("acme", kind, f"batch_{token_hex(12)}")
        await store_event(self.broker, event)
        return event_id(event.subject)

    async def create(self, receiver: WebhookReceiver) -> Any:
        return await self.client.webhooks.create(name="ours", url=receiver.url, event_types=ENDED)

    async def deliveries(self, endpoint: str) -> list[dict[str, Any]]:
        """The log of an endpoint, the newest first."""
        path = f"/webhook_endpoints/{endpoint}/deliveries?limit=1000"
        found = await self.client.get(path, cast_to=httpx.Response)
        data: list[dict[str, Any]] = found.json()["data"]
        return data

    async def has_ended(self, endpoint: str, event: str, status: str) -> Any:
        """The delivery of an event, once it has this status."""
        log = {each["id"]: each for each in await self.deliveries(endpoint)}
        return log[event] if event in log and log[event]["status"] == status else None


def deliverer(nats_url: str, name: str = "jobs-1") -> AbstractAsyncContextManager[asyncio.Event]:
    """A jobs service that tries webhooks again soon."""
    told = {"webhook_network": LOOPBACK, "webhook_retry_seconds": SOON}
    return running(jobs.service, jobs_settings(nats_url, id=name, **told))


@asynccontextmanager
async def webhook_gateway(nats_url: str) -> AsyncIterator[WebhookCell]:
    """A gateway without a jobs service."""
    async with (
        gateways(nats_url, webhook_network=LOOPBACK) as (gateway,),
        sdk(gateway) as client,
        connect(nats_url, "test") as broker,
    ):
        yield WebhookCell(gateway, client, broker)


@asynccontextmanager
async def webhook_cell(nats_url: str) -> AsyncIterator[WebhookCell]:
    """A gateway, and a jobs service beside it."""
    async with webhook_gateway(nats_url) as cell, deliverer(nats_url):
        yield cell


async def test_the_sdk_keeps_endpoints(nats_url: str) -> None:
    """All that it has for them; the secret is shown when it is made, and never again."""
    async with webhook_cell(nats_url) as cell, webhook_receiver() as receiver:
        webhooks = cell.client.webhooks
        assert (await webhooks.event_types.list()).data == [kind.value for kind in EventType]
        made = await cell.create(receiver)
        assert made.signing_secret.startswith("whsec_")
        assert made.signing_secret_hint.endswith(made.signing_secret[-4:])
        shown = await webhooks.retrieve(made.id)
        assert shown.model_dump() == {**made.model_dump(exclude={"signing_secret"})}
        changed = await webhooks.update(made.id, name="renamed", event_types=["batch.expired"])
        assert (changed.name, changed.event_types, changed.url) == (
            "renamed",
            ["batch.expired"],
            receiver.url,
        )
        second = await cell.create(receiver)
        listed = [each.id async for each in webhooks.list(limit=1)]
        assert sorted(listed) == sorted([made.id, second.id])
        tested = await webhooks.test(made.id, event_type="response.completed")
        assert (tested.status_code, tested.success, tested.webhook_endpoint_id) == (
            204,
            True,
            made.id,
        )
        assert (await webhooks.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await webhooks.retrieve(made.id)
        assert [each.id async for each in webhooks.list()] == [second.id]
        async with sdk(cell.gateway, OTHER_KEY) as stranger:
            assert [each async for each in stranger.webhooks.list()] == []
            for call in (stranger.webhooks.retrieve, stranger.webhooks.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(second.id)
            with pytest.raises(openai.NotFoundError):
                await stranger.get(
                    f"/webhook_endpoints/{second.id}/deliveries", cast_to=httpx.Response
                )


async def test_the_end_of_a_batch_is_told_and_verified(nats_url: str) -> None:
    """By the SDK and by the specification's own library; of the types asked for alone."""
    async with (
        webhook_receiver() as receiver,
        jobs_cell(
            nats_url, settings={"webhook_network": LOOPBACK}, webhook_network=LOOPBACK
        ) as client,
    ):
        endpoint = await client.webhooks.create(
            name="ours", url=receiver.url, event_types=["batch.completed"]
        )
        await ended(client, await submit(client, [b"no line\n"]))
        batch = await ended(client, await submit(client, [chat_line(0)]))
        await eventually(lambda: receiver.received)
        (webhook,) = receiver.received
        assert webhook.path == "/hooks?of=acme"
        event: Any = client.webhooks.unwrap(
            webhook.body, webhook.headers, secret=endpoint.signing_secret
        )
        assert (event.type, event.data.id, event.id) == ("batch.completed", batch.id, webhook.id)
        assert (await client.batches.retrieve(event.data.id)).status == "completed"
        assert Webhook(endpoint.signing_secret).verify(webhook.body, webhook.headers)


async def test_a_threshold_of_a_quota_is_told(nats_url: str) -> None:
    """The event is one of our own, with the amounts."""
    async with webhook_cell(nats_url) as cell, webhook_receiver() as receiver:
        await cell.client.webhooks.create(name="q", url=receiver.url, event_types=THRESHOLD)
        reached = QuotaThreshold("acme", "tenant", "tokens_per_day", "2026-11-28", 80, 100, 81)
        await cell.broker.store(reached.subject, reached.encode(cell.broker.clock.now()))
        await eventually(lambda: receiver.received)
        told = receiver.received[0].json
        assert (told["type"], told["data"]["percent"]) == ("quota.threshold_reached", 80)


async def test_several_services_and_those_after_them_deliver_each_event_once(nats_url: str) -> None:
    """By a lease, and by the cursor and the records that the earlier ones have left."""
    async with webhook_gateway(nats_url) as cell, webhook_receiver() as receiver:
        endpoint = await cell.create(receiver)
        events: list[str] = []

        async def are_delivered() -> bool:
            log = await cell.deliveries(endpoint.id)
            return [each["status"] for each in log] == ["delivered"] * len(events)

        for round in range(2):
            async with deliverer(nats_url, f"jobs-{round}a"), deliverer(nats_url, f"jobs-{round}b"):
                events.extend([await cell.note() for _ in range(20)])
                await eventually(are_delivered)
        assert receiver.ids == dict.fromkeys(events, 1)


async def test_a_rotated_secret_still_signs_for_a_day_if_that_is_asked_for(nats_url: str) -> None:
    """Else it signs nothing any more."""
    async with webhook_cell(nats_url) as cell, webhook_receiver() as receiver:
        made = await cell.create(receiver)
        second = await cell.client.webhooks.rotate_secret(
            made.id, keep_old_secret_active_for_24_hours=True
        )
        await cell.client.webhooks.test(made.id, event_type="batch.completed")
        for secret in (made.signing_secret, second.signing_secret):
            cell.client.webhooks.unwrap(
                receiver.received[0].body, receiver.received[0].headers, secret=secret
            )
        third = await cell.client.webhooks.rotate_secret(made.id)
        await cell.client.webhooks.test(made.id, event_type="batch.completed")
        latest = receiver.received[1]
        assert Webhook(third.signing_secret).verify(latest.body, latest.headers)
        for secret in (made.signing_secret, second.signing_secret):
            with pytest.raises(WebhookVerificationError):
                Webhook(secret).verify(latest.body, latest.headers)


@pytest.mark.parametrize(
    "refusal", [500, 429, "302 Found\r\nLocation: http://127.0.0.1/elsewhere", 404, "no http"]
)
async def test_what_is_no_success_is_tried_again_with_the_same_id(
    nats_url: str, refusal: int | str
) -> None:
    """A redirect, too, which is not followed."""
    answers: list[int | str] = [refusal, refusal, 200]
    async with (
        webhook_cell(nats_url) as cell,
        webhook_receiver(lambda webhook: answers.pop(0)) as receiver,
    ):
        endpoint = await cell.create(receiver)
        event = await cell.note()
        done = await eventually(lambda: cell.has_ended(endpoint.id, event, "delivered"))
        assert [each.id for each in receiver.received] == [event] * 3
        assert len({each.body for each in receiver.received}) == 1
        assert [each["status_code"] for each in done["attempts"]][-1] == 200
        assert len(done["attempts"]) == 3


async def test_after_the_last_attempt_it_has_failed_until_it_is_asked_for_again(
    nats_url: str,
) -> None:
    """With a log of what was answered; the second round has the same id."""
    async with (
        webhook_cell(nats_url) as cell,
        webhook_receiver(lambda webhook: 503) as receiver,
    ):
        endpoint = await cell.create(receiver)
        event = await cell.note()
        failed = await eventually(lambda: cell.has_ended(endpoint.id, event, "failed"))
        assert [each["status_code"] for each in failed["attempts"]] == [503] * 4
        receiver.respond = lambda webhook: 200
        path = f"/webhook_endpoints/{endpoint.id}/deliveries/{event}/redeliver"
        await cell.client.post(path, cast_to=httpx.Response)
        await eventually(lambda: cell.has_ended(endpoint.id, event, "delivered"))
        assert receiver.ids == {event: 5}


async def test_an_endpoint_that_is_gone_is_disabled_until_a_client_enables_it(
    nats_url: str,
) -> None:
    """410 says so; what happens meanwhile is not told."""
    async with (
        webhook_cell(nats_url) as cell,
        webhook_receiver(lambda webhook: 410) as receiver,
    ):
        endpoint = await cell.create(receiver)
        event = await cell.note()
        await eventually(lambda: cell.has_ended(endpoint.id, event, "failed"))

        async def status() -> str:
            found: Any = await cell.client.webhooks.retrieve(endpoint.id)
            return str(found.status)

        async def is_disabled() -> bool:
            return await status() == "disabled"

        await eventually(is_disabled)
        await cell.note()
        receiver.respond = lambda webhook: 200
        enabled = {"enabled": True}
        await cell.client.webhooks.update(endpoint.id, extra_body=enabled)
        assert await status() == "enabled"
        last = await cell.note()
        await eventually(lambda: cell.has_ended(endpoint.id, last, "delivered"))
        assert [each.id for each in receiver.received if each.id != event][-1:] == [last]


async def test_retry_after_is_honoured(nats_url: str) -> None:
    """The next attempt is not before the time that the endpoint has asked for."""
    async with (
        webhook_cell(nats_url) as cell,
        webhook_receiver(lambda webhook: "429 Slow\r\nRetry-After: 3600") as receiver,
    ):
        endpoint = await cell.create(receiver)
        event = await cell.note()
        await eventually(lambda: receiver.received)

        async def attempted() -> Any:
            log = await cell.deliveries(endpoint.id)
            return log[0] if log and log[0]["attempts"] else None

        found = await eventually(attempted)
        assert (found["id"], found["status"]) == (event, "pending")
        assert found["next_attempt_at"] >= found["attempts"][0]["created_at"] + 3599


async def test_an_endpoint_that_never_answers_delays_nobody(nats_url: str) -> None:
    """It holds its own attempts, and the others get all of theirs meanwhile."""

    def never(webhook: ReceivedWebhook) -> None:
        return None

    async with (
        webhook_cell(nats_url) as cell,
        webhook_receiver(never) as dead,
        webhook_receiver() as alive,
    ):
        await cell.create(dead)
        await cell.create(alive)
        events = [await cell.note() for _ in range(30)]
        await eventually(lambda: len(alive.ids) == len(events))
        assert alive.ids == dict.fromkeys(events, 1)
        assert len(dead.received) <= 4
        assert set(dead.ids) <= set(events)


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        (job_subjects.webhook_endpoint("acme", "broken"), b"no record"),
        (job_subjects.webhook_endpoint("acme", "broken"), messages.pack(NO_ENDPOINT)),
        (job_subjects.delivery("acme", "broken", "evt_broken"), b"no record"),
        (job_subjects.delivery("acme", "broken", "evt_broken"), messages.pack(NO_DELIVERY)),
        (job_subjects.event("acme", "batch.completed", "batch_broken"), b"no event"),
        (job_subjects.event("acme", "batch.completed", "batch_broken"), NO_EVENT),
        (job_subjects.EVENT_CURSOR, b"no cursor"),
        (job_subjects.EVENT_CURSOR, b'{"WEBHOOKS": null}'),
    ],
)
async def test_what_cannot_be_read_stops_nothing_else(
    nats_url: str, subject: str, data: bytes
) -> None:
    """A record, an event or the cursor: bytes of no format, and fields of another kind."""
    async with webhook_gateway(nats_url) as cell, webhook_receiver() as receiver:
        endpoint = await cell.create(receiver)
        await cell.broker.store(subject, data)
        event = await cell.note()
        async with deliverer(nats_url):
            await eventually(lambda: cell.has_ended(endpoint.id, event, "delivered"))
        assert receiver.ids == {event: 1}


async def test_a_url_that_would_not_be_called_is_refused(nats_url: str) -> None:
    """Creation refuses it by its text alone; a gateway calls nobody."""
    async with gateways(nats_url) as (gateway,), sdk(gateway) as client:
        for url in UNCALLED:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.webhooks.create(name="ours", url=url, event_types=ENDED)
            assert caught.value.param == "url"
        assert [each async for each in client.webhooks.list()] == []


async def test_a_test_of_an_endpoint_where_nobody_listens_is_refused(nats_url: str) -> None:
    """The sentence says what became of it."""
    async with webhook_cell(nats_url) as cell, webhook_receiver() as receiver:
        made = await cell.client.webhooks.create(
            name="ours", url="http://127.0.0.1:1/", event_types=ENDED
        )
        with pytest.raises(openai.BadRequestError, match="did not answer: no connection"):
            await cell.client.webhooks.test(made.id, event_type="batch.completed")
        assert receiver.received == []

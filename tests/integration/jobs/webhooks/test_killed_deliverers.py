"""Webhooks while the services that deliver them are killed: each event arrives, by one id."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex

from streams.records.webhooks.event_outbox import store_event
from streams.records.webhooks.events import EventType, WebhookEvent, event_id
from tests.integration.jobs.test_batches import sdk
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import gateways
from tests.support.service_process import ServiceProcess, service_process
from tests.support.webhook_receiver import LOOPBACK, ReceivedWebhook, webhook_receiver

EVENTS = 300
KILLS = 3


async def test_each_event_arrives_whatever_dies(nats_url: str, tmp_path: Path) -> None:
    """Two services, of which the delivering one is killed; three of ten are refused at first."""

    def refuse_some(webhook: ReceivedWebhook) -> int:
        is_refused = int(webhook.id[-2:], 16) % 10 < 3
        return 503 if is_refused and receiver.ids[webhook.id] == 1 else 200

    async with (
        gateways(nats_url, webhook_network=LOOPBACK) as (gateway,),
        sdk(gateway) as client,
        connect(nats_url, "test") as broker,
        webhook_receiver(refuse_some) as receiver,
        AsyncExitStack() as stack,
    ):

        def start(number: int) -> ServiceProcess:
            log = tmp_path / f"jobs-{number}.log"
            settings = {"webhook_network": LOOPBACK[0], "webhook_retry_seconds": 0.5}
            return stack.enter_context(
                service_process("jobs", nats_url, log, id=f"jobs-{number}", **settings)
            )

        def find_leader() -> ServiceProcess | None:
            """The last one to gain the lease, of those that run."""
            found = [each for each in services if each.process.poll() is None]
            return next((each for each in found if "jobs_2ewebhooks" in each.log.read_text()), None)

        services = [start(0), start(1)]
        endpoint = await client.webhooks.create(
            name="ours", url=receiver.url, event_types=["response.completed"]
        )
        events = [
            WebhookEvent("acme", EventType.RESPONSE_COMPLETED, f"resp_{token_hex(12)}")
            for _ in range(EVENTS)
        ]
        wanted = {event_id(event.subject) for event in events}

        async def note_events() -> None:
            for event in events:
                await store_event(broker, event)
                await store_event(broker, event)  # whoever ends it may do it again

        noting = asyncio.create_task(note_events())
        for number in range(KILLS):
            arrived = EVENTS * (number + 1) // (KILLS + 1)
            await eventually(lambda arrived=arrived: len(receiver.ids) >= arrived)  # type: ignore[misc]
            leader = await eventually(find_leader)
            leader.kill()
            services.append(start(number + 2))
        await noting
        await eventually(lambda: receiver.ids.keys() >= wanted)
        assert receiver.ids.keys() == wanted
        for webhook in receiver.received:
            body = client.webhooks.unwrap(
                webhook.body, webhook.headers, secret=endpoint.signing_secret
            )
            assert body.id == webhook.id
        assert len({(each.id, each.body) for each in receiver.received}) == EVENTS

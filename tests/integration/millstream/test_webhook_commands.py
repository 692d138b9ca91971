"""`millstream webhooks …` against a running cell, as its users type it."""

import json
from typing import Any

from tests.integration.jobs.webhooks.test_webhooks import webhook_cell
from tests.integration.millstream.test_batch_commands import Answer, command
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway
from tests.support.webhook_receiver import webhook_receiver


async def webhooks(gateway: RunningGateway, *words: str) -> Answer:
    return await command(gateway, "webhooks", *words)


async def test_an_endpoint_is_made_tested_rotated_and_deleted(nats_url: str) -> None:
    """Each command with JSON for programs: one object, or a line for each of a list."""
    async with webhook_cell(nats_url) as cell, webhook_receiver() as receiver:
        gateway, kind = cell.gateway, ("--event", "batch.completed")
        made = (await webhooks(gateway, "create", receiver.url, *kind, "--json")).json
        assert made["signing_secret"].startswith("whsec_")
        assert made["event_types"] == ["batch.completed"]
        listed = await webhooks(gateway, "list", "--json")
        assert [json.loads(line)["id"] for line in listed.out.splitlines()] == [made["id"]]
        assert 'signing_secret"' not in listed.out
        tested = (await webhooks(gateway, "test", made["id"], "--json")).json
        assert tested["status_code"] == 204
        event = await cell.note()

        async def delivered() -> Any:
            return await cell.has_ended(made["id"], event, "delivered")

        await eventually(delivered)
        shown = await webhooks(gateway, "deliveries", made["id"], "--limit", "2", "--json")
        log = {each["id"]: each for each in map(json.loads, shown.out.splitlines())}
        assert [each["is_test"] for each in log.values() if each["id"] != event] == [True]
        assert log[event]["event"]["type"] == "batch.completed"
        table = (await webhooks(gateway, "deliveries", made["id"])).out.replace("│", " ")
        words = " ".join(table.split())
        assert f"{event} batch.completed delivered 1, last: 204" in words
        assert (await webhooks(gateway, "redeliver", made["id"], event)).status == 0
        await eventually(lambda: receiver.ids[event] == 2)
        rotated = (await webhooks(gateway, "rotate", made["id"], "--keep-old", "--json")).json
        assert rotated["signing_secret"] != made["signing_secret"]
        receiver.respond = lambda webhook: 500
        assert (await webhooks(gateway, "test", made["id"])).status == 1
        receiver.respond = lambda webhook: 410
        assert (await webhooks(gateway, "test", made["id"])).status == 1

        async def disabled() -> bool:
            listed = await webhooks(gateway, "list", "--json")
            return bool(json.loads(listed.out)["status"] == "disabled")

        await eventually(disabled)
        enabled = (await webhooks(gateway, "enable", made["id"], "--json")).json
        assert enabled["status"] == "enabled"
        assert (await webhooks(gateway, "delete", made["id"], "--json")).json["deleted"]
        gone = await webhooks(gateway, "test", made["id"])
        assert gone.status == 1
        assert "there is no webhook endpoint" in gone.errors

"""`millstream why`: what is known of a request at each place of its walk."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from millstream.admin import why
from millstream.admin.console_output import NOT_FOUND
from millstream.admin.explanations import explain_request
from millstream.admin.settings import WhySettings
from registry.tenant_records import Tenant
from registry.tenants import Tenants
from streams import subjects
from streams.topology import token_stream_of
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    command_settings,
    dispatcher_settings,
    running,
    worker_settings,
)


def about(c: BrokerClient, request_id: str) -> Awaitable[dict[str, Any]]:
    return why.collect_facts(c.broker, ["mock"], WhySettings(request_id=request_id))


async def stands(c: BrokerClient, request_id: str, state: str) -> dict[str, Any] | None:
    facts = await about(c, request_id)
    return facts if facts["state"] == state else None


async def test_a_request_that_waits_says_what_for(nats_url: str) -> None:
    """Behind its tenant's earlier ones, and without a worker."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        first, second = await c.send(), await c.send()
        facts = await eventually(lambda: stands(c, second, "queued"))
        assert (facts["ahead_of_its_tenant"], facts["ahead"]) == (1, 1)
        assert facts["reason"] == "behind_others"
        words = explain_request(await about(c, first))
        assert "It is next; no worker serves the model." in words
        tenant = await why.collect_facts(c.broker, ["mock"], WhySettings(tenant="acme"))
        assert [stood["queued"] for stood in tenant["models"]] == [{"standard": 2}]


async def test_a_request_is_followed_from_worker_to_ledger(nats_url: str) -> None:
    """Where it runs and how far it is, how it ended, also when its log is gone."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=5) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        request = await c.send(max_tokens=5000)
        await eventually(lambda: len(c.records.get(request, [])) > 3)
        facts = await eventually(lambda: stands(c, request, "in_flight"))
        assert (facts["attempts"], facts["tenant"]) == (1, "acme")
        assert facts["tokens"] > 0
        assert "It runs on worker" in explain_request(facts)
        await c.cancel(request)
        facts = await eventually(lambda: stands(c, request, "finished"))
        assert facts["outcome"] == "cancelled"
        await eventually(lambda: ledgered(c))
        await c.broker.js.purge_stream(token_stream_of(request, 1))
        facts = await eventually(lambda: stands(c, request, "finished"))
        assert facts["outcome"] == "cancelled"
        assert facts["completion_tokens"] > 0


async def test_an_unknown_request_is_status_1(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For scripts."""
    async with broker_client(nats_url):
        settings = WhySettings(**command_settings(nats_url), request_id="0123456789abcdef")
        assert await why.run(settings, asyncio.Event()) == NOT_FOUND
        assert "is not known" in capsys.readouterr().out


async def test_an_unknown_tenant_is_said_to_be_unknown(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip of the pen must not look like a tenant that is well."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        tenants = await Tenants.open(c.broker)
        await tenants.upsert(Tenant(name="quiet"))
        await tenants.close()
        assert await why.run(
            WhySettings(**command_settings(nats_url), tenant="quite"), asyncio.Event()
        )
        assert "There is no tenant 'quite'" in capsys.readouterr().out

        async def is_explained() -> bool:
            return not await why.run(
                WhySettings(**command_settings(nats_url), tenant="quiet"), asyncio.Event()
            )

        await eventually(is_explained)
        assert "Tenant quiet at mock" in capsys.readouterr().out


async def ledgered(c: BrokerClient) -> bool:
    return bool(await c.broker.read_subject("LEDGER", subjects.ALL_LEDGERS))

"""Submissions that wait in a producer's stream are seen by whoever asks how much waits."""

from typing import Any

from prometheus_client import REGISTRY

import dispatcher.service
from millstream.admin import lag, why
from millstream.admin.explanations import explain_tenant
from millstream.admin.settings import WhySettings
from registry.store import Registry
from streams.broker.broker_client import Broker
from tests.integration.gateway.entrypoints.test_nats_ingress import producer, waiting
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import gateways, register, tenants
from tests.support.services import dispatcher_settings, running


async def lanes_with_four(broker: Broker, registry: Registry) -> list[dict[str, Any]]:
    report = await lag.collect_report(broker, registry)
    counts = [(lane["submissions"], lane["queued"]) for lane in report["lanes"]]
    return report["lanes"] if counts == [(4, 2)] else []


async def test_what_waits_to_be_accepted_is_told(nats_url: str) -> None:
    """A full lane holds four of six back: `lag`, `why` and the metrics count them."""
    await register(nats_url)
    async with (
        gateways(nats_url, tenants=tenants(max_queued=2)),
        producer(nats_url) as p,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        connect(nats_url, "lag") as broker,
    ):
        for i in range(6):
            await p.submit({"prompt": "x", "max_tokens": 2}, str(i))
        await eventually(lambda: waiting(nats_url, 4))
        registry = await Registry.open(broker)
        (lane,) = await eventually(lambda: lanes_with_four(broker, registry))
        await registry.close()
        assert (lane["tenant"], lane["model"], lane["priority"]) == ("acme", "mock", "batch")
        assert lag._format_queued(lane) == "2 +4"
        facts = await why.collect_facts(broker, ["mock"], WhySettings(tenant="acme"))
        assert [each["submissions"] for each in facts["models"]] == [{"batch": 4}]
        assert "4 requests submitted over NATS and not accepted yet." in explain_tenant(facts)
        labels = {"model": "mock", "priority": "batch"}
        name = "millstream_dispatcher_waiting_submissions"
        await eventually(lambda: REGISTRY.get_sample_value(name, labels) == 4)

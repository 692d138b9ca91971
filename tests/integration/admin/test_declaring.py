"""One admin service declares, another takes over, and the rest of the cell goes on without any."""

import asyncio
from pathlib import Path

import pytest

import dispatcher.service
import gateway.service
import gpu_worker.service
from dispatcher import service as dispatching
from gateway.settings import GatewaySettings
from registry.kv_view import BucketMissing
from registry.tenant_records import Tenant
from registry.tenants import Tenants
from streams import subjects, topology
from streams.broker.broker_client import Broker
from streams.coordination.lease_bucket import STREAM, key_subject
from streams.messages import StreamReport
from tests.support.accounts_server import connect
from tests.support.admins import running_admin
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway, cell
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess, service_process
from tests.support.services import (
    MAX_QUEUED,
    dispatcher_settings,
    running,
    worker_settings,
)

NEEDED = {*topology.stream_names(2), "KV_registry", "KV_tenants", "KV_leases"}


async def stream_names(broker: Broker) -> set[str]:
    return {info.config.name or "" for info in await broker.js.streams_info()}


async def leader(broker: Broker) -> str:
    """The admin service that holds the lease; "" while none does."""
    found = await broker.read(STREAM, {"last_by_subj": key_subject("admin")})
    return found[0].data.decode().partition(".")[0] if found else ""


async def test_a_fresh_broker_gets_all_that_the_services_need(nats_url: str) -> None:
    """As many shards, copies and queued requests as the settings and the tenants say."""
    async with running_admin(nats_url, shards=2), connect(nats_url, "test") as broker:
        await eventually(lambda: _has(broker, NEEDED))
        tenants = await Tenants.open(broker)
        await tenants.upsert(Tenant(name="acme", max_queued=MAX_QUEUED, publishes=True))
        await tenants.close()
        await eventually(lambda: _has(broker, {"INGRESS_acme"}))
        await eventually(lambda: _has_limit(broker, MAX_QUEUED))


async def _has(broker: Broker, names: set[str]) -> bool:
    return names <= await stream_names(broker)


async def _has_limit(broker: Broker, limit: int) -> bool:
    info = await broker.js.stream_info(topology.REQUESTS)
    return info.config.max_msgs_per_subject == limit


async def test_the_declarer_says_what_there_is(nats_url: str) -> None:
    """Gateways learn from it which streams are others than before, or cannot be used."""
    async with running_admin(nats_url), connect(nats_url, "test") as broker:
        await eventually(lambda: _report(broker))
        report = await _report(broker)
        assert report
        assert {*topology.stream_names(1)} <= report.created.keys()
        assert (report.unusable, report.lane_limit) == ({}, 1000)


async def _report(broker: Broker) -> StreamReport | None:
    answer = await broker.request(subjects.DECLARE, b"", 1.0)
    return StreamReport.unpack(answer) if answer else None


async def test_another_one_declares_when_the_declarer_is_killed(
    nats_url: str, tmp_path: Path
) -> None:
    """A stream that is deleted meanwhile comes back, and so do the records of a lost bucket."""
    with (
        service_process("admin", nats_url, tmp_path / "a.log", id="a") as a,
        service_process("admin", nats_url, tmp_path / "b.log", id="b") as b,
    ):
        async with connect(nats_url, "test") as broker:
            both: dict[str, ServiceProcess] = {"a": a, "b": b}
            await eventually(lambda: all(s.has_logged("admin_listening") for s in both.values()))
            await eventually(lambda: _has(broker, {*topology.stream_names(1)}))
            tenants = await Tenants.open(broker)
            await tenants.upsert(Tenant(name="acme", source="api"))
            await tenants.close()
            first = await leader(broker)
            both.pop(first).kill()
            await broker.js.delete_stream(topology.WORK)
            await broker.js.delete_stream("KV_tenants")
            (second,) = both
            await eventually(lambda: _leads(broker, second))
            await eventually(lambda: _has(broker, {topology.WORK, "KV_tenants"}))
            reading = await Tenants.open(broker)
            await eventually(lambda: reading.get("acme") is not None)
            await reading.close()


async def _leads(broker: Broker, name: str) -> bool:
    return await leader(broker) == name


async def test_the_cell_serves_while_no_admin_service_runs(nats_url: str) -> None:
    """Also a gateway and a worker that start meanwhile: what they need is there."""
    async with cell(nats_url):
        pass
    port = free_port()
    async with (
        running(gateway.service, GatewaySettings(nats=nats_url, port=port, drain_seconds=5)),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        client = RunningGateway(port, asyncio.Event())
        await eventually(client.is_ready)
        answer = await client.complete()
        assert answer.json["usage"]["completion_tokens"] == 8


async def test_a_service_without_an_admin_service_says_what_to_start(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time that it waits for one that starts together with it."""
    monkeypatch.setattr(dispatching, "WAIT_SECONDS", 0.3)
    with pytest.raises(BucketMissing, match=r"no bucket 'registry'.*`millstream admin`"):
        await dispatcher.service.run(dispatcher_settings(nats_url), asyncio.Event())


async def test_a_service_waits_for_the_admin_service(nats_url: str) -> None:
    """All of a cell start at once, in any order."""
    async with running(dispatcher.service, dispatcher_settings(nats_url)):
        async with connect(nats_url, "test") as broker:
            asked = asyncio.Event()

            async def on_request(_: object) -> None:
                asked.set()

            await broker.subscribe(subjects.DECLARE, on_request)
            await eventually(asked.is_set)
            async with running_admin(nats_url):
                await eventually(lambda: _has_member(broker))


async def _has_member(broker: Broker) -> bool:
    return bool(await broker.read_subject(STREAM, key_subject("members", "dispatchers", "*")))

"""Work that lies there while workers are free is noticed, and comes after all."""

from datetime import UTC, datetime, timedelta

import pytest
from nats.js.api import ConsumerInfo

import dispatcher.service
import gpu_worker.service
from dispatcher import model_dispatcher
from dispatcher.reconcile import stuck_consumer_detector
from dispatcher.reconcile.in_flight_requests import InFlightReconciler
from dispatcher.reconcile.queued_requests import QueuedReconciler
from streams import messages, topology
from streams.messages import Request
from streams.subjects import PoolKey, Priority
from tests.integration.gpu_worker.test_worker_death import gap_free
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

PAYLOAD = Request("generate", messages.pack_tokens(list(b"hello"))).pack()
SLOW = {"ttft_ms": 1, "itl_ms": 5}
index, work = QueuedReconciler._get_consumer, InFlightReconciler._get_consumer
WORK_CONSUMER = (
    topology.work_consumer(PoolKey("mock", "1", Priority.STANDARD), 5).durable_name or ""
)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds between two looks, and until something is done, are of no use here."""
    monkeypatch.setattr(model_dispatcher, "RECONCILE_SECONDS", 0.2)
    monkeypatch.setattr(stuck_consumer_detector, "STUCK_SECONDS", 0.6)


async def index_consumer(c: BrokerClient) -> str:
    """Its name; empty while a leader makes another."""
    found = await c.broker.js.consumers_info(topology.REQUESTS)
    return str(found[0].name) if found else ""


async def pause(c: BrokerClient, stream: str, consumer: str) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    await c.broker.js.pause_consumer(stream, consumer, until.isoformat().replace("+00:00", "Z"))


async def unexplained(inventory: InFlightReconciler, name: str) -> ConsumerInfo | None:
    """What the broker says of a consumer, but for that it is paused."""
    info = await work(inventory, name)
    return info.evolve(paused=None) if info else None


async def test_a_removed_work_consumer_is_made_anew_by_its_workers(nats_url: str) -> None:
    """What runs goes on, though it is delivered again; what waits is served."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        runs = await c.send(max_tokens=300)
        await eventually(lambda: c.record_counts(runs)["chunk"])
        await c.broker.js.delete_consumer(topology.WORK, WORK_CONSUMER)
        waits = await c.send()
        await eventually(lambda: c.terminal(waits))
        await eventually(lambda: c.terminal(runs))
        assert c.attempts(runs) == [1]
        assert len(c.tokens(runs)) == 300
        await eventually(c.is_idle)
        assert await c.ledger_counts() == {runs: 1, waits: 1}


async def test_a_paused_work_consumer_is_resumed(nats_url: str) -> None:
    """Its workers wait for work that lies there; only the dispatcher sees both."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        first = await c.send()
        await eventually(lambda: c.terminal(first))
        await pause(c, topology.WORK, WORK_CONSUMER)
        request = await c.send()
        terminal = await eventually(lambda: c.terminal(request))
        assert terminal["type"] == "done"


async def test_a_consumer_that_delivers_nothing_is_replaced(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever holds it up: what runs is not lost, and what waits comes."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        runs = await c.send(max_tokens=2000)
        await eventually(lambda: c.record_counts(runs)["chunk"])
        await pause(c, topology.WORK, WORK_CONSUMER)
        before = await c.broker.js.consumer_info(topology.WORK, WORK_CONSUMER)
        monkeypatch.setattr(InFlightReconciler, "_get_consumer", unexplained)
        waits = await c.send()
        await eventually(lambda: c.terminal(waits))
        after = await c.broker.js.consumer_info(topology.WORK, WORK_CONSUMER)
        assert after.created != before.created
        await c.cancel(runs)
        await eventually(lambda: c.terminal(runs))
        assert gap_free(c, runs)
        await eventually(c.is_idle)


@pytest.mark.parametrize("act", ["delete", "pause"])
async def test_a_leader_whose_index_is_gone_or_dead_makes_another(nats_url: str, act: str) -> None:
    """Requests wait in the broker, and would until their deadlines."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        await eventually(c.report)
        index = await index_consumer(c)
        if act == "delete":
            await c.broker.js.delete_consumer(topology.REQUESTS, index)
        else:
            await pause(c, topology.REQUESTS, index)
        request = await c.send()
        await eventually(lambda: c.terminal(request))
        assert await index_consumer(c) != index


async def test_a_request_that_its_index_has_done_with_is_delivered_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker whose disk was full forgets, when it starts again, that it was removed."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        await eventually(c.report)
        request, before = await c.send(), await index_consumer(c)

        async def done_with(audit: QueuedReconciler, name: str) -> ConsumerInfo | None:
            info = await index(audit, name)
            return info.evolve(ack_floor=info.delivered) if info and name == before else info

        monkeypatch.setattr(QueuedReconciler, "_get_consumer", done_with)

        async def begun_anew() -> bool:
            return await index_consumer(c) not in ("", before)

        await eventually(begun_anew)
        async with running(gpu_worker.service, worker_settings(nats_url)):
            await eventually(lambda: c.terminal(request))
            await eventually(c.is_idle)

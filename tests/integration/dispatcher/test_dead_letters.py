"""Work that no worker can finish ends for the client, and is kept for the operator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import dispatcher.service
import gpu_worker.service
from dispatcher import model_dispatcher
from dispatcher.model_dispatcher import ModelDispatcher
from streams import messages, subjects, topology
from streams.broker import declaration
from streams.broker.pull_loop import Delivery, PullLoop
from streams.messages import Heartbeat, Request
from streams.subjects import PoolKey, Priority
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    connect_worker,
    dispatcher_settings,
    running,
    worker_settings,
)

PAYLOAD = Request("generate", messages.pack_tokens(list(b"hello"))).pack()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds between two looks are of no use here."""
    monkeypatch.setattr(model_dispatcher, "RECONCILE_SECONDS", 0.2)


@asynccontextmanager
async def a_bad_worker(nats_url: str) -> AsyncIterator[list[int]]:
    """It announces room, and gives back everything that it gets; yields which deliveries."""
    pool = PoolKey("mock", "1", Priority.STANDARD)
    consumer = topology.work_consumer(pool, 5)
    assert consumer.durable_name
    seen: list[int] = []

    def take(delivery: Delivery) -> None:
        seen.append(delivery.num_delivered)
        tasks.create_task(delivery.nak())

    async def announce() -> None:
        """Until somebody gives it work: whoever leads later has not heard the first time."""
        beat = Heartbeat("bad", "mock", "1", 4, 1000, 0, 0, 4, 1000, 0, 0.0)
        while not seen:
            await broker.publish(subjects.fleet("mock", "bad"), beat.pack())
            await asyncio.sleep(0.1)

    async with connect_worker(nats_url, "bad") as broker, asyncio.TaskGroup() as tasks:
        await declaration.declare_consumer(broker, topology.WORK, consumer)
        pull = PullLoop(broker, topology.WORK, consumer.durable_name, lambda: 1, take)
        working = [tasks.create_task(pull.run()), tasks.create_task(announce())]
        yield seen
        for task in working:
            task.cancel()


async def given_up(c: BrokerClient) -> bool:
    """True when the broker waits no more for work that it has delivered."""
    consumer = topology.work_consumer(PoolKey("mock", "1", Priority.STANDARD), 5)
    assert consumer.durable_name
    info = await c.broker.js.consumer_info(topology.WORK, consumer.durable_name)
    return bool(info.delivered.consumer_seq) and not info.num_ack_pending


async def reasons(c: BrokerClient) -> list[str]:
    return [m.headers["Reason"] for m in await c.broker.read_subject(topology.DEAD, "infer.dead.>")]


async def test_a_poison_request_becomes_a_dead_letter(nats_url: str) -> None:
    """It would go round for ever, and take down one worker after the other."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        await eventually(c.report)
        async with a_bad_worker(nats_url) as seen:
            request = await c.send()
            terminal = await eventually(lambda: c.terminal(request))
            assert terminal["code"] == "attempts_exhausted"
            assert seen == list(range(1, topology.MAX_DELIVERIES + 1))
        await eventually(c.is_idle)
        assert await reasons(c) == ["attempts_exhausted"]
        assert await c.ledger_counts() == {request: 1}
        (letter,) = await c.broker.read_subject(topology.DEAD, "infer.dead.acme.mock")
        assert Request.unpack(letter.data).prompt == messages.pack_tokens(list(b"hello"))


async def test_a_poison_request_is_found_when_its_advisory_was_lost(nats_url: str) -> None:
    """The broker tells once, and here nobody listens; good work in between is left alone."""
    async with broker_client(nats_url) as c:
        request = await c.publish_work(c.envelope(5, 8), PAYLOAD)
        async with a_bad_worker(nats_url) as seen:
            # it gives up when somebody asks for more, not with the last delivery
            await eventually(lambda: given_up(c))
            assert len(seen) == topology.MAX_DELIVERIES
        good = await c.publish_work(c.envelope(5, 8), PAYLOAD)
        async with running(dispatcher.service, dispatcher_settings(nats_url)):
            terminal = await eventually(lambda: c.terminal(request))
            assert terminal["code"] == "attempts_exhausted"
            assert await reasons(c) == ["attempts_exhausted"]
            async with running(gpu_worker.service, worker_settings(nats_url)):
                terminal = await eventually(lambda: c.terminal(good))
                assert terminal["type"] == "done"
                await eventually(c.is_idle)
        assert await c.ledger_counts() == {request: 1, good: 1}


async def test_a_payload_that_cannot_be_read_harms_nobody_else(nats_url: str) -> None:
    """A bug in one gateway must not take the workers down."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        bad = await c.publish_work(c.envelope(5, 8), b"\xc1 this is no msgpack")
        good = await c.send()
        await eventually(lambda: c.terminal(good))
        terminal = await eventually(lambda: c.terminal(bad))
        assert terminal["code"] == "attempts_exhausted"
        await eventually(c.is_idle)
        assert await c.ledger_counts() == {bad: 1, good: 1}


async def test_headers_that_cannot_be_read_harm_nobody_else(nats_url: str) -> None:
    """Such work cannot even be ended; it goes where an operator sees it."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        work = subjects.work(PoolKey("mock", "1", Priority.STANDARD))
        await c.broker.store(work, PAYLOAD, {"Cost": "much"})
        await c.broker.store("infer.request.acme.mock.standard", PAYLOAD, {"Cost": "much"})
        good = await c.send()
        await eventually(lambda: c.terminal(good))
        await eventually(c.is_idle)
        assert await reasons(c) == ["malformed"]


async def test_work_that_outlives_its_deadline_without_a_worker_expires(nats_url: str) -> None:
    """The worker that should have ended it is gone, and with it the pool."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        request = await c.publish_work(c.envelope(5, 8, deadline_seconds=0.1), PAYLOAD)
        terminal = await eventually(lambda: c.terminal(request))
        assert terminal["code"] == "deadline_exceeded"
        await eventually(c.is_idle)
        assert await reasons(c) == []
        assert await c.ledger_counts() == {request: 1}


async def test_a_lost_ledger_message_is_made_up_for(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request in flight for ever would count against the tenant in every report."""

    async def deaf(*_: object) -> None:
        return None

    monkeypatch.setattr(ModelDispatcher, "_on_ledger", deaf)
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        request = await c.send()
        await eventually(lambda: c.terminal(request))

        async def nothing_in_flight() -> bool:
            report = await c.report()
            return report is not None and report["lanes"] == []

        await eventually(nothing_in_flight)

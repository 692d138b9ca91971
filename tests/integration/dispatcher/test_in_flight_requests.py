"""What is in WORK, and what the leader believes to be there."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.aio.msg import Msg

import dispatcher.service
import gpu_worker.service
from dispatcher import model_dispatcher
from dispatcher.dispatching.model_state import ModelState
from dispatcher.model_dispatcher import ModelDispatcher
from dispatcher.reconcile import in_flight_requests
from dispatcher.reconcile.in_flight_requests import InFlightReconciler
from dispatcher.reconcile.requeuer import Requeuer
from dispatcher.workers.placed_requests import StrandedWork
from streams import messages, subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, StoredMessage
from streams.messages import Request
from streams.subjects import PoolKey, Priority
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

PAYLOAD = Request("generate", messages.pack_tokens(list(b"hello"))).pack()
UNHEARD_OF = ["infer.work.mock.1.urgent.any", "infer.work.mock.1.standard.UPPER"]
LONG = {"ttft_ms": 1, "itl_ms": 5, "sequences": 1}


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds between two looks are of no use here."""
    monkeypatch.setattr(model_dispatcher, "RECONCILE_SECONDS", 0.2)


@asynccontextmanager
async def served(nats_url: str) -> AsyncIterator[BrokerClient]:
    """A client of a dispatcher and a worker with one place."""
    async with (
        broker_client(nats_url, **LONG) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        yield c


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each stream is read."""
    counted: Counter[str] = Counter()
    read = Broker.read_subject

    async def reading(self: Broker, stream: str, *words: Any) -> list[StoredMessage]:
        counted[stream] += 1
        return await read(self, stream, *words)

    monkeypatch.setattr(Broker, "read_subject", reading)
    return counted


async def one_runs_and_two_wait(c: BrokerClient) -> tuple[str, list[str]]:
    """All of them in WORK, at a worker with one place."""
    runs = await c.send(max_tokens=1500)
    await eventually(lambda: c.record_counts(runs)["chunk"])
    waiting = [await c.send() for _ in range(2)]

    async def lie_there() -> bool:
        return await c.message_count(topology.WORK) == 3

    await eventually(lie_there)
    return runs, waiting


async def test_what_nobody_had_pulled_when_it_was_purged_ends_soon(nats_url: str) -> None:
    """Its client would wait until the deadline; what runs has no need of its work."""
    async with served(nats_url) as c:
        runs, waiting = await one_runs_and_two_wait(c)
        await c.broker.js.purge_stream(topology.WORK)
        await eventually(lambda: all(c.terminal(request) for request in waiting))
        assert [c.records[request][-1]["code"] for request in waiting] == ["work_lost"] * 2
        await c.cancel(runs)
        assert (await eventually(lambda: c.terminal(runs)))["type"] == "done"
        assert await c.ledger_counts() == dict.fromkeys([runs, *waiting], 1)
        after = await c.send()
        assert (await eventually(lambda: c.terminal(after)))["type"] == "done"


async def test_what_runs_and_waits_in_order_is_not_read_again_and_again(
    nats_url: str, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payloads of a large fleet every two seconds would be most of what its broker sends."""
    ended: list[InFlightReconciler] = []
    look = InFlightReconciler.reconcile

    async def looking(self: InFlightReconciler) -> None:
        await look(self)
        ended.append(self)

    monkeypatch.setattr(InFlightReconciler, "reconcile", looking)
    monkeypatch.setattr(in_flight_requests, "REPORT_SECONDS", 1.0)
    async with served(nats_url) as c:
        runs, _ = await one_runs_and_two_wait(c)
        reads.clear()
        ended.clear()
        await eventually(lambda: len(ended) > 15)
        assert reads[topology.WORK] < 5  # none, on a machine that beats in time
        await c.cancel(runs)
        await eventually(c.is_idle)


async def test_what_is_doubted_once_is_not_read(
    nats_url: str, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large fleet there is always something that was pulled just now and not told of yet."""
    doubts: list[int] = []

    def one_after_another(self: InFlightReconciler, *words: Any) -> set[int]:
        doubts.append(len(doubts))
        return {doubts[-1]}

    monkeypatch.setattr(InFlightReconciler, "_find_doubted", one_after_another)
    async with served(nats_url) as c:
        runs, _ = await one_runs_and_two_wait(c)
        reads.clear()
        doubted = len(doubts)
        await eventually(lambda: len(doubts) > doubted + 5)
        assert reads[topology.WORK] == 0
        await c.cancel(runs)
        await eventually(c.is_idle)


async def test_what_has_ended_is_not_lost_with_its_log(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader has missed the end, and the brokers forgot it: it was told, and billed."""

    async def miss(self: ModelDispatcher, msg: Msg) -> None:
        return

    monkeypatch.setattr(ModelDispatcher, "_on_ledger", miss)
    monkeypatch.setattr(in_flight_requests, "REPORT_SECONDS", 0.5)
    async with served(nats_url) as c:
        request = await c.send()
        await eventually(lambda: c.terminal(request))
        await eventually(c.ledger_counts)
        await c.broker.js.purge_stream(topology.token_stream_name(0))

        async def is_settled() -> bool:
            told = await c.report()
            return told is not None and not any(lane["in_flight"] for lane in told["lanes"])

        await eventually(is_settled)
        assert ((await c.read_log(request)).terminal or {}).get("type") == "done"
        assert await c.ledger_counts() == {request: 1}


async def test_what_others_have_put_there_is_in_nobodys_way(nats_url: str) -> None:
    """A leader that cannot read it would fall, and so would each that comes after it."""
    async with broker_client(nats_url, ttft_ms=1, itl_ms=1) as c:
        pool = PoolKey("mock", "1", Priority.STANDARD)
        ours = c.envelope(5, 8).to_headers()
        for subject in UNHEARD_OF:
            await c.broker.store(subject, PAYLOAD, ours)
        for wrong in ({"Cost": "much"}, {"Request": "a b"}, {"Priority": "urgent"}):
            await c.broker.store(subjects.work(pool), PAYLOAD, ours | wrong)
        async with (
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url)),
        ):
            good = await c.send()
            await eventually(lambda: c.terminal(good))

            async def laid_aside() -> bool:
                return await c.message_count(topology.DEAD) == 3

            await eventually(laid_aside)

            async def others_alone_are_left() -> bool:
                left = await c.broker.read_subject(topology.WORK, subjects.work_of("mock"))
                return [message.subject for message in left] == UNHEARD_OF

            await eventually(others_alone_are_left)  # ours is acknowledged after its terminal


async def test_what_nobody_can_read_does_not_stay_with_a_worker_that_is_gone(nats_url: str) -> None:
    """All of WORK would be read again and again for its sake."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        lane = subjects.work(PoolKey("mock", "1", Priority.STANDARD), "gone")
        await c.broker.store(lane, PAYLOAD, {"Made-By": "hand"})
        await eventually(c.is_idle)
        assert await c.message_count(topology.DEAD) == 1


async def test_what_others_have_put_into_a_workers_lane_is_laid_aside(nats_url: str) -> None:
    """What is ours is taken back from there all the same."""
    async with broker_client(nats_url) as c:
        lane = subjects.work(PoolKey("mock", "1", Priority.STANDARD), "w1")
        consumer = topology.worker_consumer("mock", "1", "w1", 5)
        await declaration.declare_consumer(c.broker, topology.WORK, consumer)
        ours = c.envelope(5, 8).to_headers()
        await c.broker.store(lane, PAYLOAD, {"Made-By": "hand"})
        await c.broker.store("infer.work.mock.1.urgent.w1", PAYLOAD, ours)
        await c.broker.store(lane, PAYLOAD, ours)
        await Requeuer(c.broker, ModelState("mock")).requeue(StrandedWork("w1", "1", 3, "silent"))

        async def taken_back() -> bool:
            left = await c.broker.read_subject(topology.WORK, subjects.work_of("mock"))
            return [subjects.placement(message.subject) for message in left] == [subjects.ANY]

        await eventually(taken_back)
        assert await c.message_count(topology.DEAD) == 1

"""A request that makes engines fail is told apart from those that were there with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from nats.aio.msg import Msg

import dispatcher.service
import gpu_worker.service
from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.mock import MockEngine
from gpu_worker.settings import WorkerSettings
from streams import messages, subjects, topology
from streams.messages import Heartbeat
from streams.records import attempt_history, dead_letters
from streams.records.attempt_history import FaultScope
from streams.records.token_log import TokenLog
from streams.subjects import LogAddress
from tests.support.eventually import eventually
from tests.support.services import (
    ROUTE,
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

POISON = list(b"poison")
SLOW = {"ttft_ms": 1, "itl_ms": 5}


@pytest.fixture(autouse=True)
def _poisonous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock engine fails in the first step with the poison."""
    poisoned: set[MockEngine] = set()
    add, step = MockEngine.add, MockEngine.step

    def maybe_add(self: MockEngine, sequence: Sequence) -> None:
        add(self, sequence)
        if sequence.prompt == POISON:
            poisoned.add(self)

    def maybe_step(self: MockEngine) -> list[Output]:
        if self in poisoned:
            raise RuntimeError("an illegal memory access")
        return step(self)

    monkeypatch.setattr(MockEngine, "add", maybe_add)
    monkeypatch.setattr(MockEngine, "step", maybe_step)


@asynccontextmanager
async def supervised(settings: WorkerSettings) -> AsyncIterator[list[BaseException]]:
    """A worker that is started again when it has ended; yields what it ended with."""
    deaths: list[BaseException] = []
    stop = asyncio.Event()

    async def keep() -> None:
        while not stop.is_set():
            try:
                await gpu_worker.service.run(settings, stop)
            except ExceptionGroup as error:
                deaths.append(error)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep())
        yield deaths
        stop.set()


async def faults(c: BrokerClient, request: str) -> list[FaultScope]:
    """What is said of a request's attempts."""
    log = await c.read_log(request)
    found = await attempt_history.read_history(
        c.broker, LogAddress(c.tenants[request], ROUTE, request), log
    )
    return [each.fault for each in found.attempts]


async def test_the_innocent_of_a_poisoned_batch_go_on_and_the_poison_is_buried(
    nats_url: str,
) -> None:
    """They were in the same engines, and it failed no oftener than the poison may be tried."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        supervised(worker_settings(nats_url, id="w", beat_seconds=0.2)) as deaths,
    ):
        innocent = [await c.send(f"prompt {i}", max_tokens=400, tenant="good") for i in range(20)]
        await eventually(lambda: all(c.record_counts(request)["chunk"] for request in innocent))
        poison = await c.send("poison", tenant="evil")
        terminal = await eventually(lambda: c.terminal(poison))
        assert (terminal["code"], c.attempts(poison)) == ("attempts_exhausted", [1, 2, 3])
        await eventually(lambda: all(c.terminal(request) for request in innocent))
        assert all(len(c.tokens(request)) == 400 for request in innocent)
        assert len(deaths) == attempt_history.MAX_FAILURES
        (letter,) = await dead_letters.read_dead_letters(c.broker)
        assert (letter.name, letter.tenant, letter.reason) == (poison, "evil", terminal["code"])
        assert [(each.worker, each.fault) for each in letter.history.attempts] == [
            ("w", FaultScope.SHARED),
            ("w", FaultScope.SHARED),
            ("w", FaultScope.OWN),
        ]
        assert all("illegal memory access" in each.error for each in letter.history.attempts)
        await eventually(c.is_idle)
        assert set((await c.ledger_counts()).values()) == {1}


async def test_a_request_that_ends_its_process_is_found_out(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody lives to say so: the next attempt finds that it died while it started alone."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        poison = await c.send("poison")
        with monkeypatch.context() as m:
            m.setattr("gpu_worker.pool.model_server.ModelServer._handle_engine_failure", _die)
            for died in range(1, attempt_history.MAX_FAILURES + 1):
                settings = worker_settings(nats_url, beat_seconds=0.2, ack_wait_seconds=3)
                with pytest.raises(ExceptionGroup):
                    await gpu_worker.service.run(settings, asyncio.Event())
                assert len(await faults(c, poison)) == died
        assert c.terminal(poison) is None
        async with running(gpu_worker.service, worker_settings(nats_url)):
            terminal = await eventually(lambda: c.terminal(poison))
        assert terminal["code"] == "attempts_exhausted"
        (letter,) = await dead_letters.read_dead_letters(c.broker)
        assert [each.fault for each in letter.history.attempts] == [
            FaultScope.SHARED,
            FaultScope.SHARED,
            FaultScope.OWN,
        ]


async def _die(*_: object) -> None:
    raise RuntimeError("the process has ended")


def _goes_on(c: BrokerClient, request: str, attempt: int) -> bool:
    """Whether this attempt has claimed it, and stored tokens."""
    kinds = [record["type"] for record in c.records.get(request, [])]
    return kinds.count("started") == attempt and kinds[-1] == "chunk"


async def test_a_suspect_whose_worker_is_wrongly_taken_for_dead_is_not_convicted(
    nats_url: str,
) -> None:
    """It was cut off for a moment: it lives, finds itself overtaken, and says so in time."""
    async with (
        broker_client(
            nats_url, ttft_ms=2000, itl_ms=1, sequences=1
        ) as c,  # it does not pull it again
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        suspect = await c.send("a prompt", max_tokens=20)
        await _failed_twice(c, suspect)
        deliveries = await _deliveries(c)
        async with running(
            gpu_worker.service, worker_settings(nats_url, id="w1", beat_seconds=0.2)
        ):
            await eventually(lambda: deliveries and c.attempts(suspect) == [1, 2, 3])
            await eventually(partial(_on_trial, c, suspect))
            async with running(
                gpu_worker.service, worker_settings(nats_url, id="w2", beat_seconds=0.2)
            ):
                await c.broker.publish(deliveries[0], b"-NAK")
                await eventually(lambda: c.attempts(suspect) == [1, 2, 3, 4])
                terminal = await eventually(lambda: c.terminal(suspect))
        assert terminal.get("finish_reason") == "length", terminal
        assert (await faults(c, suspect))[:3] == [
            FaultScope.SHARED,
            FaultScope.SHARED,
            FaultScope.NONE,
        ]


async def _failed_twice(c: BrokerClient, request: str) -> None:
    """A request's history, before any worker of the test begins."""
    address = LogAddress(c.tenants[request], ROUTE, request)
    for attempt in (1, 2):
        await TokenLog(c.broker, address, shards=1).claim("mock", "1", "w0")
        await attempt_history.store_note(
            c.broker, address, attempt_history.make_note(attempt, "w0", "failed", at=1)
        )


async def _deliveries(c: BrokerClient) -> list[str]:
    """The reply subjects of what workers accept from now on, as they say: by a nak the broker
    delivers it to another one, as when the ack wait is over.
    """
    taken: list[str] = []

    async def on_beat(msg: Msg) -> None:
        taken.extend(Heartbeat.unpack(msg.data).taken)

    await c.broker.subscribe(subjects.fleet_of("mock"), on_beat)
    return taken


async def _on_trial(c: BrokerClient, request: str) -> bool:
    subject = subjects.attempts(c.tenants[request], request)
    stored = await c.broker.read_subject(topology.ATTEMPTS, subject)
    return bool(messages.unpack(stored[-1].data)["kind"] == "trial")


async def test_hand_overs_do_not_count_against_a_request(nats_url: str) -> None:
    """A rolling restart of the fleet meets a long generation again and again."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        request = await c.send("a prompt", max_tokens=300)
        for attempt in range(1, 7):
            async with running(gpu_worker.service, worker_settings(nats_url, drain_seconds=0)):
                await eventually(partial(_goes_on, c, request, attempt))
        assert await faults(c, request) == [FaultScope.NONE] * 6
        async with running(gpu_worker.service, worker_settings(nats_url)):
            terminal = await eventually(lambda: c.terminal(request))
        assert (terminal["finish_reason"], len(c.tokens(request))) == ("length", 300)
        assert await dead_letters.read_dead_letters(c.broker) == []

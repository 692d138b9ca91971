"""Several models in one worker: they take turns on the memory, and fail apart from each other."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

import dispatcher.service
import gpu_worker.service
from gpu_worker.engines.engine import DoesNotFit, Output
from gpu_worker.engines.engine_watchdog import EngineHung
from gpu_worker.engines.mock import MockEngine
from gpu_worker.models import model_manager
from registry.model_inspection import model_from
from registry.models import mock_model
from streams import topology
from streams.records.attempt_history import MAX_FAILURES
from tests.engine.tiny_models import expected, model, save
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    broker_client_of,
    dispatcher_settings,
    running,
    worker_settings,
)

TINY = ("a", "b", "c")
MIB = 2**20
MOVES = ("model_ready", "model_closed")
HEALTHY = {"ttft_ms": 1, "itl_ms": 5}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model("llama"), tmp_path_factory.mktemp("tiny") / "llama")


@asynccontextmanager
async def three_models(nats_url: str, directory: Path) -> AsyncIterator[BrokerClient]:
    """The same weights under three names."""
    models = [model_from(directory, name) for name in TINY]
    async with broker_client_of(nats_url, models[0]) as c:
        for other in models[1:]:
            await c.registry.add_model(other)
        yield c


@pytest.fixture
def said() -> Iterator[list[Any]]:
    """Log events of the worker in this process."""
    with capture_logs() as events:
        yield events


def named(events: Any, name: str) -> list[str]:
    return [event["model"] for event in events if event["event"] == name]


async def test_models_that_do_not_fit_together_take_turns(
    nats_url: str, directory: Path, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request is answered as if its model were alone; one model is in memory at a time."""
    size = (directory / "model.safetensors").stat().st_size
    monkeypatch.setattr(
        "gpu_worker.models.model_eviction.WORKING_MEMORY_SHARE", 32 * MIB * 4 / size
    )
    settings = worker_settings(
        nats_url,
        model=TINY,
        memory=200 * MIB,
        min_residency_seconds=0.2,
        max_sequences=8,
        threads=1,
    )
    async with (
        three_models(nats_url, directory) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, settings),
    ):
        requests = {
            await c.send(
                f"prompt {n} of {name}", model=name, max_tokens=12
            ): f"prompt {n} of {name}"
            for n in range(3)
            for name in TINY
        }
        await eventually(lambda: all(c.terminal(request) for request in requests))
        for request, prompt in requests.items():
            assert c.tokens(request) == expected("llama", list(prompt.encode()), 12)
            assert c.attempts(request) == [1]
        await eventually(c.is_idle)
        assert await c.ledger_counts() == dict.fromkeys(requests, 1)
        order = [(e["event"], e["model"]) for e in said if e["event"] in MOVES]
        assert [event for event, _ in order] == [
            "model_ready",
            *["model_closed", "model_ready"] * (len(order) // 2),
        ]
        assert {name for event, name in order if event == "model_ready"} == {*TINY}
        assert all(e["loaded_seconds"] >= 0.2 for e in said if e["event"] == "model_closed")
        await eventually(lambda: shown(c))
        await eventually(lambda: len(counted()) == 1)
        assert all(steps > 0 for steps in counted().values())
    assert not counted(), "a worker that has ended shows nothing"


def counted() -> dict[str, float]:
    """The steps of the engines that are loaded, by model, as scraped."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    steps = [s for s in samples if s.name == "millstream_worker_steps_total"]
    return {s.labels["model"]: s.value for s in steps if s.labels["model"] in TINY}


async def shown(c: BrokerClient) -> bool:
    """`millstream lag` learns which models are loaded."""
    reports = [await c.report(name) for name in TINY]
    resident = [worker["resident"] for r in reports if r for worker in r["workers"]]
    return sorted(resident) == [False, False, True]


@pytest.mark.parametrize("room", [{"memory": 1000}, {"memory": MIB, "adapter_bytes": MIB}])
async def test_a_model_that_cannot_fit_stops_the_worker_with_numbers(
    nats_url: str, directory: Path, room: dict[str, int]
) -> None:
    """At start-up, not with the first request."""
    async with three_models(nats_url, directory):
        settings = worker_settings(nats_url, model=TINY, **room)
        with pytest.raises(DoesNotFit, match=f"may take {room['memory']:,}"):
            await gpu_worker.service.run(settings, asyncio.Event())


async def test_a_waiting_request_can_be_cancelled_and_expires(
    nats_url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is not loaded, and will not be for an hour."""
    size = (directory / "model.safetensors").stat().st_size
    monkeypatch.setattr(
        "gpu_worker.models.model_eviction.WORKING_MEMORY_SHARE", 32 * MIB * 4 / size
    )
    settings = worker_settings(
        nats_url, model=TINY, memory=200 * MIB, min_residency_seconds=3600, max_sequences=8
    )
    async with (
        three_models(nats_url, directory) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, settings),
    ):
        cancelled = await c.send(model="b")
        await eventually(lambda: c.attempts(cancelled))  # worker and dispatcher have begun
        late = await c.send(model="c", deadline_seconds=6)
        await eventually(lambda: c.attempts(late))
        await c.cancel(cancelled)
        terminal = await eventually(lambda: c.terminal(cancelled))
        assert terminal["finish_reason"] == "cancelled"
        terminal = await eventually(lambda: c.terminal(late))
        assert terminal["code"] == "deadline_exceeded"
        await eventually(c.is_idle)


Step = Callable[[MockEngine], list[Output]]


@asynccontextmanager
async def two_mocks(nats_url: str) -> AsyncIterator[BrokerClient]:
    async with broker_client_of(nats_url, mock_model("good", **HEALTHY)) as c:
        await c.registry.add_model(mock_model("bad", ttft_ms=1, itl_ms=2))
        yield c


def crashing_on(monkeypatch: pytest.MonkeyPatch, poison: str) -> None:
    """Steps raise while a sequence of this prompt is in the engine."""
    step: Step = MockEngine.step
    prompt = list(poison.encode())

    def maybe_step(self: MockEngine) -> list[Output]:
        if any(stream.sequence.prompt == prompt for stream in self._sequences.values()):
            raise RuntimeError("a kernel does not like this")
        return step(self)

    monkeypatch.setattr(MockEngine, "step", maybe_step)


async def test_an_engine_that_crashes_is_built_again_beside_an_unharmed_one(
    nats_url: str, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poison ends as a dead letter at its third crash; then the model serves again."""
    crashing_on(monkeypatch, "poison")
    monkeypatch.setattr(model_manager, "MIN_BACKOFF_SECONDS", 0.05)
    async with (
        two_mocks(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=("good", "bad"))),
    ):
        steady = await c.send(model="good", max_tokens=400)
        await eventually(lambda: c.tokens(steady) if steady in c.records else None)
        poison = await c.send("poison", model="bad")
        terminal = await eventually(lambda: c.terminal(poison))
        assert terminal["code"] == "attempts_exhausted"
        after = await c.send("healthy", model="bad")
        await eventually(lambda: c.terminal(after))
        await eventually(lambda: c.terminal(steady))
        assert c.attempts(steady) == [1]
        assert len(c.tokens(steady)) == 400
        await eventually(c.is_idle)
        letters = await c.broker.read_subject(topology.DEAD, "infer.dead.acme.bad")
        assert [letter.headers["Reason"] for letter in letters] == ["attempts_exhausted"]
        assert await c.ledger_counts() == dict.fromkeys([steady, poison, after], 1)
        assert named(said, "engine_backoff") == ["bad@1"] * MAX_FAILURES


async def test_a_model_that_cannot_be_loaded_gives_its_work_back_and_is_tried_again(
    nats_url: str, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may be slow to come back; the worker's other model serves on."""
    crashing_on(monkeypatch, "poison")
    monkeypatch.setattr(model_manager, "MIN_BACKOFF_SECONDS", 0.05)
    load = MockEngine.load
    failures = iter(range(2))

    def maybe_load(directory: Path | None = None, **options: Any) -> MockEngine:
        if options.get("itl_ms") == 2 and said_crash() and next(failures, None) is not None:
            raise OSError("the disk is away")
        return load(directory, **options)

    def said_crash() -> bool:
        return any(event["event"] == "engine_backoff" for event in said)

    monkeypatch.setattr(MockEngine, "load", maybe_load)
    async with (
        two_mocks(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=("good", "bad"))),
    ):
        poison = await c.send("poison", model="bad")
        await eventually(said_crash)
        await c.cancel(poison)
        request = await c.send(model="bad")
        await eventually(lambda: c.terminal(request))
        assert len(named(said, "model_not_loaded")) >= 1
        good = await c.send(model="good")
        await eventually(lambda: c.terminal(good))


async def test_a_hung_step_gives_its_work_back_and_ends_the_worker(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stuck thread cannot be ended: another worker takes over at once, the process must go."""
    engines: list[MockEngine] = []
    hung, never = threading.Event(), threading.Event()
    step: Step = MockEngine.step

    def maybe_step(self: MockEngine) -> list[Output]:
        if hung.is_set() and self is engines[0]:
            never.wait()
        return step(self)

    def load(*_: object, **options: float) -> MockEngine:
        engines.append(MockEngine(ttft_ms=1, itl_ms=5))
        return engines[-1]

    monkeypatch.setattr(MockEngine, "step", maybe_step)
    monkeypatch.setattr(MockEngine, "load", load)
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        settings = worker_settings(nats_url, ack_wait_seconds=60, engine_timeout_seconds=3)
        hanging = asyncio.create_task(gpu_worker.service.run(settings, asyncio.Event()))
        request = await c.send(max_tokens=100)
        await eventually(lambda: len(c.records.get(request, [])) > 5)
        async with running(gpu_worker.service, worker_settings(nats_url, ack_wait_seconds=60)):
            hung.set()
            await eventually(lambda: c.terminal(request))
            assert c.attempts(request) == [1, 2]
            assert len(c.tokens(request)) == 100
        with pytest.raises(ExceptionGroup) as raised:
            await hanging
        assert raised.group_contains(EngineHung)
        await eventually(c.is_idle)
        assert await c.ledger_counts() == {request: 1}
        never.set()

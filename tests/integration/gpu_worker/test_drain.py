"""A worker that stops finishes what it can, and hands the rest to another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

import dispatcher.service
import gpu_worker.service
from dispatcher.workers import fleet
from gpu_worker.models.loading import Loader
from millstream.admin import drain
from millstream.admin.drain import WorkerNotAnswering
from millstream.admin.settings import DrainSettings
from streams import messages, subjects
from streams.messages import Heartbeat, Request
from tests.integration.gpu_worker.test_worker_death import gap_free
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    command_settings,
    dispatcher_settings,
    running,
    worker_settings,
)

SLOW = {"ttft_ms": 1, "itl_ms": 5}
PAYLOAD = Request("generate", messages.pack_tokens(list(b"hello"))).pack()


async def test_what_can_finish_in_time_does(nats_url: str) -> None:
    """A rolling restart is not seen by clients."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        async with running(gpu_worker.service, worker_settings(nats_url, drain_seconds=10)):
            requests = [await c.send(max_tokens=60) for _ in range(5)]
            await eventually(lambda: all(request in c.records for request in requests))
        assert all(c.terminal(request) for request in requests)
        assert all(c.attempts(request) == [1] for request in requests)


async def test_what_cannot_finish_in_time_is_continued_by_another(nats_url: str) -> None:
    """At once, not after an ack wait, which is a minute here."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        leaving = worker_settings(nats_url, drain_seconds=0.1, ack_wait_seconds=60)
        async with running(gpu_worker.service, leaving):
            request = await c.send(max_tokens=200)
            await eventually(lambda: len(c.records.get(request, [])) > 5)
        assert c.terminal(request) is None
        async with running(gpu_worker.service, worker_settings(nats_url, ack_wait_seconds=60)):
            await eventually(lambda: c.terminal(request))
        assert c.attempts(request) == [1, 2]
        assert len(c.tokens(request)) == 200
        await eventually(c.is_idle)
        assert await c.ledger_counts() == {request: 1}


async def test_a_draining_worker_announces_no_room_and_takes_nothing(nats_url: str) -> None:
    """What reaches the pool meanwhile waits for another worker, without using up deliveries."""
    beats: list[Heartbeat] = []

    async def on_beat(msg: Msg) -> None:
        beats.append(Heartbeat.unpack(msg.data))

    async with broker_client(nats_url, **SLOW) as c:
        await c.broker.subscribe(subjects.fleet_of("mock"), on_beat)
        async with running(gpu_worker.service, worker_settings(nats_url, id="leaving")) as stop:
            await eventually(lambda: beats)
            runs = await c.publish_work(c.envelope(5, 16), PAYLOAD)
            await eventually(lambda: runs in c.records)
            stop.set()
            await eventually(lambda: beats[-1].draining)
            assert (beats[-1].free_sequences, beats[-1].free_tokens) == (0, 0)
            requests = [await c.publish_work(c.envelope(5, 16), PAYLOAD) for _ in range(20)]
            await eventually(lambda: c.terminal(runs))
        async with running(gpu_worker.service, worker_settings(nats_url, id="stays")):
            await eventually(lambda: all(c.terminal(request) for request in requests))
        assert {c.records[request][0]["worker"] for request in requests} == {"stays"}


@asynccontextmanager
async def two_workers(
    c: BrokerClient, nats_url: str
) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """Their services by id; the ack wait is a minute."""
    ids = ("w1", "w2")
    settings = [worker_settings(nats_url, id=each, ack_wait_seconds=60) for each in ids]
    stops = [asyncio.Event() for _ in ids]
    async with asyncio.TaskGroup() as tasks:
        yield {
            each.id: tasks.create_task(gpu_worker.service.run(each, stop))
            for each, stop in zip(settings, stops, strict=True)
        }
        for stop in stops:
            stop.set()


def begun(c: BrokerClient, request: str) -> list[int]:
    """Its tokens so far."""
    return c.tokens(request) if request in c.records else []


def worker_of(c: BrokerClient, request: str) -> str:
    """Who has claimed it first."""
    return str(c.records[request][0]["worker"])


async def drained(nats_url: str, worker: str, within: float) -> None:
    settings = DrainSettings(**command_settings(nats_url), worker=worker, within=within)
    await drain.run(settings, asyncio.Event())


async def test_a_drained_worker_hands_long_work_over_at_once_and_finishes_the_rest(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reclaimed machine: no token is lost or doubled, nobody waits, the process ends well."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        two_workers(c, nats_url) as workers,
    ):
        await eventually(partial(_announced, c, 2))
        long = [await c.send(f"long {i}", max_tokens=20_000) for i in range(4)]
        await eventually(lambda: all(len(begun(c, request)) > 3 for request in long))
        leaver = worker_of(c, long[0])
        theirs = {request for request in long if worker_of(c, request) == leaver}
        short = [await c.send(f"short {i}", max_tokens=60) for i in range(4)]
        await eventually(lambda: all(len(begun(c, request)) > 3 for request in short))
        async with asyncio.timeout(20):  # 100 s of tokens are left
            await drained(nats_url, leaver, within=25)
            await workers[leaver]
        said = capsys.readouterr().out.splitlines()
        assert f"{leaver} drains, for 25 s at most" in said
        assert any(f"{leaver} is empty: " in line and "handed over" in line for line in said)
        await eventually(lambda: all(c.attempts(request) == [1, 2] for request in theirs))
        await eventually(lambda: all(c.terminal(request) for request in short))
        assert all(c.attempts(request) == [1] for request in short)
        for request in long:
            await c.cancel(request)
        await eventually(lambda: all(c.terminal(request) for request in long))
        assert all(gap_free(c, request) for request in long)
        await eventually(c.is_idle)


async def test_without_another_worker_all_is_finished_that_can_be(nats_url: str) -> None:
    """Handed over it would wait for a worker, while this one is there."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, id="alone")),
    ):
        request = await c.send(max_tokens=200)
        await eventually(lambda: len(begun(c, request)) > 3)
        await drained(nats_url, "alone", within=20)
        terminal = await eventually(lambda: c.terminal(request))
        assert (terminal["finish_reason"], c.attempts(request)) == ("length", [1])


async def test_a_drain_is_not_told_as_a_death(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators hear who has left, and what became of its work; a warning is for deaths alone."""
    monkeypatch.setattr(fleet, "STALE_HEARTBEAT_SECONDS", 0.5)
    with capture_logs() as logged:
        async with (
            broker_client(nats_url, **SLOW) as c,
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url, id="stays", beat_seconds=0.1)),
        ):
            await eventually(partial(_announced, c, 1))
            leaving = worker_settings(nats_url, id="leaves", drain_seconds=10)
            async with running(gpu_worker.service, leaving):
                await eventually(partial(_announced, c, 2))
                requests = [await c.send(f"r{i}", max_tokens=80) for i in range(6)]
                await eventually(lambda: all(request in c.records for request in requests))
                held = [r for r in requests if worker_of(c, r) == "leaves"]
            await eventually(lambda: [e for e in logged if e["event"] == "worker_drained"])
            await eventually(partial(_announced, c, 1))
            await eventually(lambda: all(c.terminal(request) for request in requests))
    told = [e for e in logged if e.get("worker") == "leaves" and e["event"].startswith("worker_")]
    assert [(e["event"], e["log_level"]) for e in told] == [("worker_drained", "info")]
    assert held
    assert told[0]["finished"] + told[0]["handed_over"] == len(held)


async def test_draining_an_unknown_worker_is_an_error(nats_url: str) -> None:
    """A script must not believe that the machine can be taken away."""
    async with broker_client(nats_url):
        with pytest.raises(WorkerNotAnswering, match="nobody"):
            await drained(nats_url, "nobody", within=1)


async def test_a_worker_that_still_loads_leaves_at_once(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nothing to finish."""
    loading = asyncio.Event()

    async def load(*_: object) -> None:
        loading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Loader, "load", load)
    async with broker_client(nats_url):
        service = asyncio.create_task(
            gpu_worker.service.run(worker_settings(nats_url, id="loads"), asyncio.Event())
        )
        await loading.wait()
        await drained(nats_url, "loads", within=60)
        await service


async def _announced(c: BrokerClient, workers: int) -> bool:
    report = await c.report()
    return report is not None and len(report["workers"]) == workers

"""What a dead worker held goes to others as soon as its death is known, not an ack wait later."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import dispatcher.service
from dispatcher.workers import fleet
from dispatcher.workers.failure_detector import DEAD_AFTER_SECONDS, SETTLE_SECONDS
from dispatcher.workers.fleet import LATE_HEARTBEAT_SECONDS
from streams import subjects
from streams.messages import Heartbeat
from streams.topology import MAX_DELIVERIES
from tests.support.eventually import eventually
from tests.support.service_process import ServiceProcess, worker_process
from tests.support.services import (
    BrokerClient,
    broker_client,
    connect_worker,
    dispatcher_settings,
    running,
)

PATIENT = {"beat_seconds": 0.2, "ack_wait_seconds": 60}  # nobody can wait for that
SLOW = {"ttft_ms": 5, "itl_ms": 10}
START = "You are a helpful assistant, and your name is Millicent. " * 4
MISSED_SECONDS = LATE_HEARTBEAT_SECONDS + DEAD_AFTER_SECONDS + 1  # by then whoever has died is


@asynccontextmanager
async def cell(nats_url: str) -> AsyncIterator[BrokerClient]:
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        yield c


def worker(nats_url: str, home: Path, name: str) -> AbstractContextManager[ServiceProcess]:
    return worker_process(nats_url, home / f"{name}.log", id=name, **PATIENT)


async def begun(c: BrokerClient, prompt: str = "a prompt") -> tuple[str, str]:
    """A long request with its first tokens, and which worker made them."""
    request = await c.send(prompt, max_tokens=4000)
    await eventually(lambda: c.record_counts(request)["chunk"] > 3)
    return request, str(c.records[request][0]["worker"])


async def goes_on(c: BrokerClient, request: str) -> None:
    """Wait until another attempt has added tokens, behind those that there were; then end it."""
    index = len(c.tokens(request))
    await eventually(lambda: c.attempts(request) == [1, 2] and len(c.tokens(request)) > index + 3)
    await ended(c, request)
    chunks = [record for record in c.records[request] if record["type"] == "chunk"]
    assert all(a["index"] + a["count"] == b["index"] for a, b in pairwise(chunks))
    assert (await c.ledger_counts())[request] == 1


async def ended(c: BrokerClient, request: str) -> None:
    await c.cancel(request)
    await eventually(lambda: c.terminal(request))
    await eventually(c.is_idle)


async def test_whoever_has_seen_it_die_says_so(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor has; the claim keeps it exact."""
    monkeypatch.setattr(fleet, "LATE_HEARTBEAT_SECONDS", 60)
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1") as w1, worker(nats_url, tmp_path, "w2") as w2:
            await eventually(lambda: w1.has_logged("model_ready") and w2.has_logged("model_ready"))
            request, holder = await begun(c)
            {"w1": w1, "w2": w2}[holder].kill()
            await c.broker.store(subjects.GONE, b"stranger")
            await eventually(lambda: reported_until_taken_over(c, holder, request))
            await goes_on(c, request)


async def reported_until_taken_over(c: BrokerClient, worker: str, request: str) -> bool:
    """Say that a worker has died; return whether another one has claimed its request.

    It is said again while the broker has not noticed that the worker's connection is closed.
    """
    await c.broker.store(subjects.GONE, worker.encode())
    return c.attempts(request) == [1, 2]


async def test_a_living_worker_is_not_dead_because_somebody_says_so(
    nats_url: str, tmp_path: Path
) -> None:
    """Repeated often enough it would use up the deliveries of all that the worker holds."""
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1") as w1, worker(nats_url, tmp_path, "w2") as w2:
            await eventually(lambda: w1.has_logged("model_ready") and w2.has_logged("model_ready"))
            request, holder = await begun(c)
            with capture_logs() as logged:
                for said in range(1, MAX_DELIVERIES + 1):
                    await c.broker.store(subjects.GONE, holder.encode())
                    await eventually(lambda said=said: refuted(logged, holder) == said)  # type: ignore[misc]
            index = len(c.tokens(request))
            await eventually(lambda: len(c.tokens(request)) > index + 3)
            await ended(c, request)
            assert c.attempts(request) == [1]


def refuted(logged: list[MutableMapping[str, Any]], worker: str) -> int:
    """How often the leader of the model has found a worker alive that was said to have died."""
    found = [event for event in logged if event["event"] == "worker_not_dead"]
    return len([event for event in found if event["worker"] == worker])


async def test_who_has_died_unseen_is_missed(nats_url: str, tmp_path: Path) -> None:
    """Its connection is gone."""
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1") as w1, worker(nats_url, tmp_path, "w2") as w2:
            await eventually(lambda: w1.has_logged("model_ready") and w2.has_logged("model_ready"))
            request, holder = await begun(c)
            {"w1": w1, "w2": w2}[holder].kill()
            await goes_on(c, request)


async def test_a_new_leader_misses_who_has_died_too(nats_url: str, tmp_path: Path) -> None:
    """Workers tell it what they hold."""
    async with broker_client(nats_url, **SLOW) as c:
        with worker(nats_url, tmp_path, "w1") as w1, worker(nats_url, tmp_path, "w2") as w2:
            async with running(dispatcher.service, dispatcher_settings(nats_url)):
                await eventually(
                    lambda: w1.has_logged("model_ready") and w2.has_logged("model_ready")
                )
                request, holder = await begun(c)
                await asyncio.sleep(MISSED_SECONDS)  # nobody tells of it by himself any more
            async with running(dispatcher.service, dispatcher_settings(nats_url)):
                await eventually(lambda: knows(c, holder))
                await asyncio.sleep(SETTLE_SECONDS)
                {"w1": w1, "w2": w2}[holder].kill()
                await goes_on(c, request)


async def test_a_frozen_worker_keeps_what_it_holds(nats_url: str, tmp_path: Path) -> None:
    """For its ack wait: it may go on at any time."""
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1") as w1, worker(nats_url, tmp_path, "w2") as w2:
            await eventually(lambda: w1.has_logged("model_ready") and w2.has_logged("model_ready"))
            request, holder = await begun(c)
            frozen = {"w1": w1, "w2": w2}[holder]
            frozen.freeze()
            await asyncio.sleep(MISSED_SECONDS)
            frozen.thaw()
            index = len(c.tokens(request))
            await eventually(lambda: len(c.tokens(request)) > index + 3)
            await ended(c, request)
            assert c.attempts(request) == [1]


async def test_what_was_placed_on_a_dead_worker_alone_goes_on_at_another(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else pulls from that lane, and silence takes its time."""
    monkeypatch.setattr(fleet, "STALE_HEARTBEAT_SECONDS", 60)
    async with cell(nats_url) as c:
        with worker(nats_url, tmp_path, "w1") as w1, worker(nats_url, tmp_path, "w2") as w2:
            await eventually(lambda: w1.has_logged("model_ready") and w2.has_logged("model_ready"))
            first = await c.send(START)
            await eventually(lambda: c.terminal(first))
            holder = str(c.records[first][0]["worker"])
            await eventually(lambda: holds(c, holder))
            request, again = await begun(c, START)
            assert again == holder
            {"w1": w1, "w2": w2}[holder].kill()
            await goes_on(c, request)


async def knows(c: BrokerClient, worker: str) -> bool:
    """Whether there is a leader that has heard of a worker."""
    report = await c.report()
    return any(w["worker"] == worker for w in report["workers"]) if report else False


async def holds(c: BrokerClient, worker: str) -> bool:
    """Whether the dispatcher has heard that a worker holds something in its cache."""
    report = await c.report()
    return any(w["worker"] == worker and w["marks"] for w in report["workers"]) if report else False


async def test_a_worker_that_ends_with_work_is_no_drained_one(nats_url: str) -> None:
    """A step that outlasts its drain: what it held is taken from it, as from a dead worker."""
    left = {"finished": 1, "handed_over": 0}
    full = Heartbeat("w", "mock", "1", 4, 1000, 1, 0, 4, 1000, 0, 0.0, drained=left)

    def told() -> list[MutableMapping[str, Any]]:
        return [event for event in logged if event["event"] == "worker_drained"]

    with capture_logs() as logged:
        async with cell(nats_url) as c, connect_worker(nats_url, "w") as w:

            async def beat(heartbeat: Heartbeat) -> bool:
                await w.publish(subjects.fleet("mock", "w"), heartbeat.pack())
                answer = await c.broker.request(subjects.report("mock"), b"", 1.0)
                workers = json.loads(answer)["workers"] if answer else []
                return "w" in {each["worker"] for each in workers}

            await eventually(lambda: beat(full))
            assert not told()
            await beat(replace(full, running=0))
            await eventually(told)

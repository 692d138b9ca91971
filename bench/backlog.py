"""Measures what a long backlog costs, and how soon another dispatcher continues with it.

(a) A million queued requests of 10,000 tenants in a leader's model state: memory of each, time to
choose the next one and its worker, and to settle it later. (b) 100,000 queued requests whose leader
is killed: time until the next one is sent to a worker, and until the other dispatcher knows all.
"""

import asyncio
import secrets
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from bench import reporting
from bench.reporting import Figure, Run
from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.tenant_queues import QueuedRequest
from streams import prefix_hashes, subjects, topology
from streams.messages import Heartbeat
from streams.subjects import Lane, Priority
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer
from tests.support.service_process import service_process
from tests.support.services import BrokerClient, broker_client

QUEUED, TENANTS, DECISIONS = 1_000_000, 10_000, 5_000
TAKEN_OVER, SIDE_BY_SIDE = 100_000, 256
FREE, BEAT_SECONDS = 8, 0.1
PREFIX_HASHES = range(12)  # of a prompt of 3,072 tokens, half of which a worker holds
VERSION = "1"

FIGURES = (
    Figure("bytes_each", f"memory of each of {QUEUED:,} queued requests, bytes", "≤ 700"),
    Figure("push_us", "time to queue one, µs"),
    Figure("decision_us", "time to choose, charge and place one, µs", "≤ 30"),
    Figure("settle_us", "time to record its sending, and later its end, µs"),
    Figure("small_decision_us", f"time to decide with {TENANTS:,} queued, µs"),
    Figure("small_settle_us", f"time to settle with {TENANTS:,} queued, µs"),
    Figure("first_seconds", f"killed leader of {TAKEN_OVER:,}: next one sent after, s", "≤ 3"),
    Figure("whole_seconds", "killed leader: all of them known after, s"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure and publish; `seconds` has no effect here."""
    setting = {"queued": QUEUED, "tenants": TENANTS, "taken_over": TAKEN_OVER}
    reporting.publish("backlog", setting, FIGURES, [_run() for _ in range(runs)])


def _run() -> Run:
    return {**_measure_state(), **asyncio.run(_measure_failover())}


def _measure_state() -> Run:
    """Part (a): the memory and times of the leader's model state."""
    tracemalloc.start()
    state = _filled_state(QUEUED)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del state
    began = time.perf_counter()
    state = _filled_state(QUEUED)
    pushed = time.perf_counter() - began
    many, few = _decisions(state), _decisions(_filled_state(TENANTS))
    return {
        "bytes_each": size / QUEUED,
        "push_us": pushed / QUEUED * 1e6,
        **many,
        **{f"small_{name}": us for name, us in few.items()},
    }


def _filled_state(count: int) -> ModelState:
    state = ModelState("model")
    for number in range(count):
        state.queue.enqueue(_queued(number), 0.0)
    return state


def _queued(number: int) -> QueuedRequest:
    """A queued request like those that a leader makes from headers."""
    reply = f"$JS.ACK.REQUESTS.index_model_0a1b2c3d.1.{number}.{number}.1763748000000000000.1"
    return QueuedRequest(
        request_id=secrets.token_hex(16),
        tenant=sys.intern(f"tenant-{number % TENANTS}"),
        priority=Priority.STANDARD,
        prompt_tokens=300 + number % 3000,
        cost=500 + number % 3000,
        accepted=1_763_748_000_000 + number,
        deadline=1_763_748_600_000 + number,
        route=sys.intern("gateway-0a1b2c3d"),
        version="",
        seq=1_000_000 + number,
        reply=reply,
    )


def _decisions(state: ModelState) -> Run:
    """The mean times to decide and to settle, with a fleet that always has room."""
    for worker, held in (("w", PREFIX_HASHES[:6]), ("v", ())):
        beat = Heartbeat(worker, "model", VERSION, 10**9, 10**12, 0, 0, 10**9, 10**12, 0, 0.0)
        state.apply_heartbeat(replace(beat, holds=prefix_hashes.pack(held)), 0.0)
    deciding = settling = 0.0
    for number in range(DECISIONS):
        began = time.perf_counter()
        found = state.select_next(lambda item: VERSION, 0.0)
        assert found
        item, _ = found
        state.reserve(item, VERSION, 0.0)
        state.place(item.request_id, PREFIX_HASHES, "")
        decided = time.perf_counter()
        state.mark_published(item.request_id, number + 1, duplicate=False)
        state.settle(item.request_id, 400, 0.0)
        deciding += decided - began
        settling += time.perf_counter() - decided
    return {
        "decision_us": deciding / DECISIONS * 1e6,
        "settle_us": settling / DECISIONS * 1e6,
    }


async def _measure_failover() -> Run:
    """Part (b): the times after the leader was killed."""
    with tempfile.TemporaryDirectory() as home:
        server = NatsServer(Path(home))
        try:
            async with broker_client(server.url) as c:
                return await _kill_leader(c, server.url, Path(home))
        finally:
            server.kill()


async def _kill_leader(c: BrokerClient, url: str, home: Path) -> Run:
    await _fill(c)
    with service_process("dispatcher", url, home / "first.log") as first:
        await eventually(lambda: _known(c, TAKEN_OVER), seconds=120)
        with service_process("dispatcher", url, home / "second.log") as second:
            await eventually(lambda: second.has_logged("members_changed"))
            first.kill()
            began = time.monotonic()
            async with _worker(c):
                await eventually(lambda: c.message_count(topology.WORK), seconds=60)
                first_seconds = time.monotonic() - began
                await eventually(lambda: _known(c, TAKEN_OVER - 2 * FREE), seconds=120)
    return {"first_seconds": first_seconds, "whole_seconds": time.monotonic() - began}


async def _fill(c: BrokerClient) -> None:
    envelopes = [
        c.envelope(300, 200, tenant=f"tenant-{number % 100}", deadline_seconds=600)
        for number in range(TAKEN_OVER)
    ]
    remaining = iter(envelopes)

    async def enqueue_remaining() -> None:
        for envelope in remaining:
            await c.enqueue(envelope, b"", Lane(envelope.tenant, "mock", Priority.STANDARD))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(SIDE_BY_SIDE):
            tasks.create_task(enqueue_remaining())


async def _known(c: BrokerClient, least: int) -> bool:
    report = await c.report()
    return report is not None and sum(lane["queued"] for lane in report["lanes"]) >= least


@asynccontextmanager
async def _worker(c: BrokerClient) -> AsyncIterator[None]:
    """Send the heartbeats of a worker that has room and pulls nothing."""

    async def beat() -> None:
        heartbeat = Heartbeat("w", "mock", VERSION, FREE, 10**9, 0, 0, FREE, 10**9, 0, 0.0).pack()
        while True:
            await c.broker.publish(subjects.fleet("mock", "w"), heartbeat)
            await asyncio.sleep(BEAT_SECONDS)

    beating = asyncio.create_task(beat())
    yield
    beating.cancel()

"""What a long backlog costs, and how soon another dispatcher goes on with it.

(a) A million queued requests of 10,000 tenants in the leader's books: memory of each, time to
decide who is next and where, and to settle that later. (b) 100,000 queued requests whose leader is
killed: time until the next one is sent to a worker, and until all are known to the other
dispatcher.
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
MARKS = range(12)  # of a prompt of 3,072 tokens, half of which a worker holds
VERSION = "1"

FIGURES = (
    Figure("bytes_each", f"memory of each of {QUEUED:,} queued requests, bytes", "≤ 700"),
    Figure("push_us", "to queue one, µs"),
    Figure("decision_us", "to choose, charge and place one, µs", "≤ 30"),
    Figure("settle_us", "to note that it was sent, and later its end, µs"),
    Figure("small_decision_us", f"to decide with {TENANTS:,} queued, µs"),
    Figure("small_settle_us", "and to settle, µs"),
    Figure("first_seconds", f"killed leader of {TAKEN_OVER:,}: next one sent, s", "≤ 3"),
    Figure("whole_seconds", "and all of them known, s"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure and publish; `seconds` says nothing here."""
    setting = {"queued": QUEUED, "tenants": TENANTS, "taken_over": TAKEN_OVER}
    reporting.publish("backlog", setting, FIGURES, [_run() for _ in range(runs)])


def _run() -> Run:
    return {**_books(), **asyncio.run(_take_over())}


def _books() -> Run:
    tracemalloc.start()
    books = _filled(QUEUED)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del books
    began = time.perf_counter()
    books = _filled(QUEUED)
    pushed = time.perf_counter() - began
    many, few = _decisions(books), _decisions(_filled(TENANTS))
    return {
        "bytes_each": size / QUEUED,
        "push_us": pushed / QUEUED * 1e6,
        **many,
        **{f"small_{name}": us for name, us in few.items()},
    }


def _filled(count: int) -> ModelState:
    books = ModelState("model")
    for number in range(count):
        books.queue.enqueue(_queued(number), 0.0)
    return books


def _queued(number: int) -> QueuedRequest:
    """As a leader makes it of headers."""
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


def _decisions(books: ModelState) -> Run:
    """What each step takes with a fleet that always has room."""
    for worker, held in (("w", MARKS[:6]), ("v", ())):
        beat = Heartbeat(worker, "model", VERSION, 10**9, 10**12, 0, 0, 10**9, 10**12, 0, 0.0)
        books.apply_heartbeat(replace(beat, holds=prefix_hashes.pack(held)), 0.0)
    deciding = settling = 0.0
    for number in range(DECISIONS):
        began = time.perf_counter()
        found = books.select_next(lambda item: VERSION, 0.0)
        assert found
        item, _ = found
        books.reserve(item, VERSION, 0.0)
        books.place(item.request_id, MARKS, "")
        decided = time.perf_counter()
        books.mark_published(item.request_id, number + 1, duplicate=False)
        books.settle(item.request_id, 400, 0.0)
        deciding += decided - began
        settling += time.perf_counter() - decided
    return {
        "decision_us": deciding / DECISIONS * 1e6,
        "settle_us": settling / DECISIONS * 1e6,
    }


async def _take_over() -> Run:
    with tempfile.TemporaryDirectory() as home:
        server = NatsServer(Path(home))
        try:
            async with broker_client(server.url) as c:
                return await _killed(c, server.url, Path(home))
        finally:
            server.kill()


async def _killed(c: BrokerClient, url: str, home: Path) -> Run:
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
    waiting = iter(envelopes)

    async def enter() -> None:
        for envelope in waiting:
            await c.enqueue(envelope, b"", Lane(envelope.tenant, "mock", Priority.STANDARD))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(SIDE_BY_SIDE):
            tasks.create_task(enter())


async def _known(c: BrokerClient, least: int) -> bool:
    report = await c.report()
    return report is not None and sum(lane["queued"] for lane in report["lanes"]) >= least


@asynccontextmanager
async def _worker(c: BrokerClient) -> AsyncIterator[None]:
    """The beats of a worker that has room and takes nothing."""

    async def beat() -> None:
        told = Heartbeat("w", "mock", VERSION, FREE, 10**9, 0, 0, FREE, 10**9, 0, 0.0).pack()
        while True:
            await c.broker.publish(subjects.fleet("mock", "w"), told)
            await asyncio.sleep(BEAT_SECONDS)

    beating = asyncio.create_task(beat())
    yield
    beating.cancel()

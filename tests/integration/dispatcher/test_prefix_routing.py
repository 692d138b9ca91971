"""Requests with one start meet at the worker that has computed it, and wait for nobody there."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import dispatcher.service
import gpu_worker.service
from dispatcher.reconcile.requeuer import build_requeue_id
from streams import subjects, topology
from streams.broker.broker_client import Broker
from streams.headers import MESSAGE_ID
from streams.subjects import PoolKey, Priority
from tests.support import gateways
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.service_process import ServiceProcess, worker_process
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

HASTY = {"beat_seconds": 0.2, "ack_wait_seconds": 3}
QUICK = {"ttft_ms": 1, "itl_ms": 1}
SLOW = {"ttft_ms": 1, "itl_ms": 10}
START = "You are a helpful assistant, and your name is Millicent. " * 4


@asynccontextmanager
async def cell(nats_url: str, *names: str, **mock: float) -> AsyncIterator[BrokerClient]:
    """A dispatcher, and workers of these names."""
    async with broker_client(nats_url, **mock) as c, AsyncExitStack() as stack:
        await stack.enter_async_context(running(dispatcher.service, dispatcher_settings(nats_url)))
        for name in names:
            settings = worker_settings(nats_url, id=name, **HASTY)
            await stack.enter_async_context(running(gpu_worker.service, settings))
        await eventually(lambda: workers(c, len(names)))
        yield c


async def workers(c: BrokerClient, count: int) -> bool:
    report = await c.report()
    return report is not None and len(report["workers"]) == count


async def known(c: BrokerClient, worker: str) -> bool:
    """Whether the dispatcher has heard that a worker holds something."""
    report = await c.report()
    marks = {each["worker"]: each["marks"] for each in report["workers"]} if report else {}
    return bool(marks.get(worker))


def cached(c: BrokerClient, request: str) -> int:
    """Tokens of a request's prompt that were found in a cache, as its usage says."""
    found: int = c.records[request][-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def server(c: BrokerClient, request: str) -> str:
    """Who serves a request, or did last."""
    return [str(r["worker"]) for r in c.records[request] if r["type"] == "started"][-1]


async def served(c: BrokerClient, text: str) -> str:
    """Send a request and wait until it has ended; who served it."""
    request = await c.send(text)
    await eventually(lambda: c.terminal(request))
    return server(c, request)


async def holder(c: BrokerClient) -> str:
    """Have the start computed; the worker that holds it then, as the dispatcher knows."""
    worker = await served(c, START)
    await eventually(lambda: known(c, worker))
    return worker


async def test_what_begins_alike_goes_to_the_worker_that_holds_it(nats_url: str) -> None:
    """And its usage tells how much was found there."""
    async with cell(nats_url, "w1", "w2", **QUICK) as c:
        first = await holder(c)
        assert {await served(c, f"{START}And {number}?") for number in range(6)} == {first}
        assert sorted(cached(c, request) for request in c.records) == [0] + 6 * [
            192
        ]  # the longest marked within 228


async def test_of_another_tenants_prompts_nothing_is_known(nats_url: str) -> None:
    """Neither where they are, nor that they were there before."""
    async with cell(nats_url, "w1", **QUICK) as c:
        await holder(c)
        request = await c.send(START, tenant="globex")
        await eventually(lambda: c.terminal(request))
        assert cached(c, request) == 0


async def test_a_full_holder_is_not_waited_for(nats_url: str) -> None:
    """Another has room, and computes the start again."""
    async with cell(nats_url, "w1", "w2", sequences=1, **SLOW) as c:
        long = await c.send(START, max_tokens=2000)
        await eventually(lambda: c.record_counts(long)["chunk"])
        await eventually(lambda: known(c, server(c, long)))
        assert await served(c, f"{START}And?") != server(c, long)
        assert c.terminal(long) is None
        await c.cancel(long)
        await eventually(c.is_idle)


@contextmanager
def two_processes(
    nats_url: str, logs: Path, **settings: float
) -> Iterator[dict[str, ServiceProcess]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(worker_process(nats_url, logs / name, id=name, **settings))
            for name in ("w1", "w2")
        }


async def test_what_was_placed_on_a_frozen_worker_is_served_by_another(
    nats_url: str, tmp_path: Path
) -> None:
    """Once, without a gap, and the frozen one adds nothing when it wakes up."""
    async with cell(nats_url, **QUICK) as c:
        with two_processes(nats_url, tmp_path, **HASTY) as processes:
            await eventually(lambda: workers(c, 2))
            first = await holder(c)
            processes[first].freeze()
            requests = [await c.send(f"{START}And {number}?") for number in range(3)]
            await eventually(lambda: all(c.terminal(request) for request in requests))
            assert first not in {server(c, request) for request in requests}
            processes[first].thaw()
            await eventually(c.is_idle)
            assert [c.record_counts(request)["done"] for request in requests] == [1, 1, 1]
            assert [len(c.tokens(request)) for request in requests] == [8, 8, 8]
        assert set((await c.ledger_counts()).values()) == {1}


async def test_what_a_killed_worker_was_at_goes_on_at_another(
    nats_url: str, tmp_path: Path
) -> None:
    """It was pulled from the lane of a worker that nobody else pulls from."""
    async with cell(nats_url, **SLOW) as c:
        with two_processes(nats_url, tmp_path, **HASTY) as processes:
            await eventually(lambda: workers(c, 2))
            first = await holder(c)
            request = await begun(c, first)
            processes[first].kill()
            await eventually(lambda: c.terminal(request))
            assert c.attempts(request) == [1, 2]
            assert len(c.tokens(request)) == 200
            await eventually(c.is_idle)
        assert set((await c.ledger_counts()).values()) == {1}


async def test_what_a_draining_worker_gives_back_goes_on_at_another(
    nats_url: str, tmp_path: Path
) -> None:
    """At once: the ack wait, which nobody waits for, is a minute here."""
    async with cell(nats_url, **SLOW) as c:
        patient = {"beat_seconds": 0.2, "ack_wait_seconds": 60, "drain_seconds": 0}
        with two_processes(nats_url, tmp_path, **patient) as processes:
            await eventually(lambda: workers(c, 2))
            first = await holder(c)
            request = await begun(c, first)
            processes[first].terminate()
            await eventually(lambda: c.terminal(request))
            assert server(c, request) != first
            assert len(c.tokens(request)) == 200
            await eventually(c.is_idle)


async def test_a_move_that_a_crash_has_cut_in_two_is_finished(nats_url: str) -> None:
    """Two messages of one request would have two workers fence each other again and again."""
    async with broker_client(nats_url) as c:
        envelope, pool = c.envelope(100, 8), PoolKey("mock", "1", Priority.STANDARD)
        before = envelope.to_headers() | {MESSAGE_ID: envelope.request_id}
        placed = await c.broker.store(subjects.work(pool, "w1"), b"", before)
        after = before | {MESSAGE_ID: build_requeue_id(envelope.request_id, placed.seq)}
        await c.broker.store(subjects.work(pool), b"", after)
        async with running(dispatcher.service, dispatcher_settings(nats_url)):
            await eventually(lambda: one_is_left(c))
            (left,) = await c.broker.read_subject(topology.WORK, subjects.work_of("mock"))
            assert subjects.placement(left.subject) == subjects.ANY


async def one_is_left(c: BrokerClient) -> bool:
    return await c.message_count(topology.WORK) == 1


async def begun(c: BrokerClient, worker: str) -> str:
    """A long request that is placed on a worker and has begun there."""
    request = await c.send(f"{START}And?", max_tokens=200)
    await eventually(lambda: c.record_counts(request)["chunk"] > 3)
    assert server(c, request) == worker
    return request


async def test_a_gateway_marks_prompts_for_their_worker(nats_url: str) -> None:
    """Every prompt that comes again finds its start, though there are three workers."""
    more = (worker_settings(nats_url, id=name, **HASTY) for name in ("w1", "w2"))
    async with (
        gateways.cell(nats_url, mock=QUICK) as (gateway,),
        running(gpu_worker.service, next(more)),
        running(gpu_worker.service, next(more)),
        connect(nats_url, "test") as broker,
    ):
        await gateway.complete(START)
        await eventually(lambda: any_known(broker))
        answers = [await gateway.complete(f"{START}And {number}?") for number in range(6)]
        details = [answer.json["usage"]["prompt_tokens_details"] for answer in answers]
        assert details == 6 * [{"cached_tokens": 192}]


async def any_known(broker: Broker) -> bool:
    """Whether the dispatcher has heard of anything that is held."""
    answer = await broker.request(subjects.report("mock"))
    report = json.loads(answer) if answer else {"workers": []}
    return any(worker["marks"] for worker in report["workers"])

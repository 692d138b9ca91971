"""A worker dies, freezes or crashes in the middle: another one continues, exactly."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest

import dispatcher.service
import gpu_worker.service
from gpu_worker.attempt.attempt import Attempt
from gpu_worker.attempt.output_buffer import OutputBuffer
from gpu_worker.engines.driver import EngineCrashed
from gpu_worker.engines.engine import Output
from gpu_worker.engines.mock import MockEngine
from streams import topology
from tests.support.accounts_server import guard
from tests.support.eventually import eventually
from tests.support.service_process import ServiceProcess, worker_process
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)
from tests.support.stalling_proxy import StallingProxy

HASTY = {"beat_seconds": 0.2, "ack_wait_seconds": 3}
SLOW = {"ttft_ms": 5, "itl_ms": 10}
ROOM = 8  # sequences at once


def gap_free(c: BrokerClient, request: str) -> bool:
    """Each token once and in order, over all attempts."""
    index = 0
    for record in c.records[request]:
        if record["type"] == "chunk":
            assert record["index"] == index
            index += record["count"]
    return index > 0


async def undisturbed(c: BrokerClient, max_tokens: int) -> str:
    """The text of the same request when nothing happens to it."""
    request = await c.send("a prompt", max_tokens=max_tokens)
    await eventually(lambda: c.terminal(request))
    assert c.attempts(request) == [1]
    return c.text(request)


def two_workers(stack: ExitStack, nats_url: str, logs: Path) -> dict[str, ServiceProcess]:
    return {
        name: stack.enter_context(worker_process(nats_url, logs / name, id=name, **HASTY))
        for name in ("w1", "w2")
    }


async def begun(c: BrokerClient, request: str) -> str:
    """Wait for the first tokens; which worker made them."""
    await eventually(lambda: len(c.records.get(request, [])) > 5)
    return str(c.records[request][0]["worker"])


async def test_the_stream_of_a_killed_worker_continues_at_another(
    nats_url: str, tmp_path: Path
) -> None:
    """Gap-free, with the text of an undisturbed run, and billed once."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        with ExitStack() as stack:
            workers = two_workers(stack, nats_url, tmp_path)
            await eventually(lambda: all(w.has_logged("model_ready") for w in workers.values()))
            request = await c.send("a prompt", max_tokens=120)
            workers[await begun(c, request)].kill()
            await eventually(lambda: c.terminal(request))
            assert c.attempts(request) == [1, 2]
            assert gap_free(c, request)
            assert c.text(request) == await undisturbed(c, 120)
            await eventually(c.is_idle)
        assert set((await c.ledger_counts()).values()) == {1}
        chunk = next(r for r in c.records[request] if r["type"] == "chunk")
        (bill,) = [each for each in await c.ledger() if each.request_id == request]
        assert bill.first == chunk["at"]  # of the attempt that gave it, not of the one that ended
        assert [each["reason"] for each in bill.earlier_attempts] == ["silent"]
        assert bill.earlier_attempts[0]["worker"] != bill.worker


async def test_a_worker_that_was_frozen_adds_nothing_and_acknowledges_nothing(
    nats_url: str, tmp_path: Path
) -> None:
    """It wakes up while another attempt runs, whose log and whose work are not its own any more."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        with ExitStack() as stack:
            workers = two_workers(stack, nats_url, tmp_path)
            await eventually(lambda: all(w.has_logged("model_ready") for w in workers.values()))
            request = await c.send("a prompt", max_tokens=300)
            zombie = workers[await begun(c, request)]
            zombie.freeze()
            await eventually(lambda: c.attempts(request) == [1, 2])
            zombie.thaw()
            await eventually(lambda: zombie.has_logged("attempt_fenced"))
            assert c.terminal(request) is None
            assert await c.message_count(topology.WORK) == 1
            await eventually(lambda: c.terminal(request))
            assert c.attempts(request) == [1, 2]
            assert gap_free(c, request)
            assert len(c.tokens(request)) == 300
            await eventually(c.is_idle)
            assert (await c.read_log(request)).records == c.records[request]
            assert await c.ledger_counts() == {request: 1}


async def test_a_crashed_engine_gives_its_work_back_at_once(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker need not wait for the ack wait, which is a minute here; the process ends."""
    broken: list[MockEngine] = []
    step: Callable[[MockEngine], list[Output]] = MockEngine.step

    def maybe_step(self: MockEngine) -> list[Output]:
        if self in broken:
            raise RuntimeError("out of memory")
        return step(self)

    engines: list[MockEngine] = []

    def load(*_: object, **options: float) -> MockEngine:
        engines.append(MockEngine(ttft_ms=1, itl_ms=5))
        return engines[-1]

    monkeypatch.setattr(MockEngine, "step", maybe_step)
    monkeypatch.setattr(MockEngine, "load", load)
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        settings = worker_settings(nats_url, ack_wait_seconds=60)
        crashing = asyncio.create_task(gpu_worker.service.run(settings, asyncio.Event()))
        request = await c.send(max_tokens=100)
        await begun(c, request)
        async with running(gpu_worker.service, settings):
            broken.append(engines[0])
            await eventually(lambda: c.terminal(request))
            assert c.attempts(request) == [1, 2]
            assert gap_free(c, request)
            assert len(c.tokens(request)) == 100
        with pytest.raises(ExceptionGroup) as raised:
            await crashing
        assert raised.group_contains(EngineCrashed)
        await eventually(c.is_idle)
        assert await c.ledger_counts() == {request: 1}


async def test_a_request_that_fails_here_is_not_mixed_with_its_next_attempt(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine may still be at it when it is delivered again to the same worker."""
    append: Callable[[Attempt, OutputBuffer], Awaitable[None]] = Attempt._append
    failures = iter(range(2))

    async def failing(self: Attempt, pending: OutputBuffer) -> None:
        await append(self, pending)
        if self._tokens > 10 and next(failures, None) is not None:
            raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Attempt, "_append", failing)
    monkeypatch.setattr("gpu_worker.attempt.attempt.RETRY_DELAY_SECONDS", 0.0)
    async with (
        broker_client(nats_url, ttft_ms=0, itl_ms=0.1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        request = await c.send("a prompt", max_tokens=2000)
        terminal = await eventually(lambda: c.terminal(request))
        assert c.attempts(request) == [1, 2, 3]
        assert terminal["finish_reason"] == "length"
        assert gap_free(c, request)
        assert c.text(request) == await undisturbed(c, 2000)


async def test_a_worker_that_is_cut_off_stops_computing_and_comes_back(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have its work after the ack wait; when the network is back it pulls anew."""
    engines: list[MockEngine] = []

    def load(*_: object, **options: float) -> MockEngine:
        engines.append(MockEngine(ttft_ms=1, itl_ms=20, sequences=ROOM))
        return engines[-1]

    monkeypatch.setattr(MockEngine, "load", load)
    async with aclosing(StallingProxy(int(nats_url.rsplit(":", 1)[1]))) as link:
        await link.open()
        guard(url := f"nats://127.0.0.1:{link.port}")
        lonely = worker_settings(url, id="w1", **HASTY)
        async with (
            broker_client(nats_url) as c,
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, lonely),
        ):
            request = await c.send(max_tokens=4000)
            assert await begun(c, request) == "w1"
            link.stall()
            await eventually(lambda: engines[0].free_capacity().sequences == ROOM)
            async with running(gpu_worker.service, worker_settings(nats_url, id="w2", **HASTY)):
                await eventually(lambda: c.attempts(request) == [1, 2])
                await c.cancel(request)
                await eventually(lambda: c.terminal(request))
            link.resume()
            again = await c.send(max_tokens=5)
            await eventually(lambda: c.terminal(again))
            assert c.records[again][0]["worker"] == "w1"
            assert gap_free(c, request)
            await eventually(c.is_idle)
            assert await c.ledger_counts() == {request: 1, again: 1}

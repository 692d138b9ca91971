"""Dispatcher and worker together: every request ends once, whatever happens on the way."""

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from dispatcher import model_dispatcher
from dispatcher.model_dispatcher import ModelDispatcher
from dispatcher.reconcile.queued_requests import QueuedReconciler
from registry.models import mock_model
from streams import topology
from streams.broker.pull_loop import Delivery
from streams.messages import LedgerRecord, from_wire, unpack
from tests.support.eventually import eventually
from tests.support.services import broker_client, dispatcher_settings, running, worker_settings


async def test_a_request_is_dispatched_generated_and_recorded(nats_url: str) -> None:
    """The walk: lane, work, claim, chunks, terminal, ledger; then nothing is left behind."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        request = await c.send(max_tokens=20)
        done = await eventually(lambda: c.terminal(request))
        kinds = [record["type"] for record in c.records[request]]
        assert (kinds[0], kinds[-1]) == ("started", "done")
        assert done["finish_reason"] == "length"
        assert done["usage"]["completion_tokens"] == 20 == len(c.tokens(request))
        assert set(done["timing"]) == {"queue", "dispatch", "prefill", "decode", "total"}

        async def left() -> bool:
            infos = [await c.broker.js.stream_info(s) for s in (topology.REQUESTS, topology.WORK)]
            return not any(info.state.messages for info in infos)

        await eventually(left)
        ledger = await c.broker.read_subject(topology.LEDGER, "infer.ledger.acme.mock")
        records = [from_wire(LedgerRecord, unpack(message.data)) for message in ledger]
        assert [(r.request_id, r.completion_tokens) for r in records] == [(request, 20)]


async def test_a_queued_request_can_be_cancelled(nats_url: str) -> None:
    """Nobody serves; the dispatcher itself ends what is still in its queue."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        request = await c.send()

        async def cancelled() -> dict[str, Any] | None:
            await c.cancel(request)
            return c.terminal(request)

        terminal = await eventually(cancelled)
        assert terminal["finish_reason"] == "cancelled"


async def test_a_running_request_can_be_cancelled(nats_url: str) -> None:
    """It stops by the next step and is billed for what was generated."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=5) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        request = await c.send(max_tokens=5000)
        await eventually(lambda: len(c.records.get(request, [])) > 3)
        await c.cancel(request)
        terminal = await eventually(lambda: c.terminal(request))
        assert terminal["finish_reason"] == "cancelled"
        assert 0 < terminal["usage"]["completion_tokens"] == len(c.tokens(request)) < 5000


async def test_a_request_past_its_deadline_ends_as_expired(nats_url: str) -> None:
    """In the queue by the dispatcher, while running by the worker: never a silent wait."""
    async with broker_client(nats_url, ttft_ms=1, itl_ms=5) as c:
        async with running(dispatcher.service, dispatcher_settings(nats_url)):
            queued = await c.send(deadline_seconds=0.2)
            assert (await eventually(lambda: c.terminal(queued)))["code"] == "deadline_exceeded"
            async with running(gpu_worker.service, worker_settings(nats_url)):
                runs = await c.send(max_tokens=5000, deadline_seconds=6.0)
                terminal = await eventually(lambda: c.terminal(runs))
                assert terminal["code"] == "deadline_exceeded"
                assert terminal["usage"]["completion_tokens"] > 0


async def test_a_delivery_that_got_lost_is_asked_for_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker waits for an acknowledgement, and would wait for a quarter of an hour."""
    index, lost = ModelDispatcher._on_request, iter([True])

    def losing(self: ModelDispatcher, delivery: Delivery) -> None:
        if not next(lost, False):
            index(self, delivery)

    monkeypatch.setattr(ModelDispatcher, "_on_request", losing)
    monkeypatch.setattr(model_dispatcher, "RECONCILE_SECONDS", 0.2)
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        request = await c.send()
        await eventually(lambda: c.terminal(request))
        assert c.attempts(request) == [1]


async def test_a_lost_delivery_behind_others_is_asked_for_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have an earlier deadline than those before it, which wait for a worker."""
    index, deliveries = ModelDispatcher._on_request, itertools.count()

    def losing(self: ModelDispatcher, delivery: Delivery) -> None:
        if next(deliveries) != 1:
            index(self, delivery)

    monkeypatch.setattr(ModelDispatcher, "_on_request", losing)
    monkeypatch.setattr(model_dispatcher, "RECONCILE_SECONDS", 0.2)
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        requests = [await c.send() for _ in range(3)]
        await c.cancel(requests[1])

        async def cancelled() -> dict[str, Any] | None:
            await c.cancel(requests[1])
            return c.terminal(requests[1])

        await eventually(cancelled)


async def test_what_only_waits_is_not_delivered_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand waiting requests, delivered again and again, would keep a leader busy."""
    monkeypatch.setattr(model_dispatcher, "RECONCILE_SECONDS", 0.05)
    counted: Counter[str] = Counter()
    index, look = ModelDispatcher._on_request, QueuedReconciler.reconcile

    def counting(self: ModelDispatcher, delivery: Delivery) -> None:
        counted["deliveries"] += 1
        index(self, delivery)

    async def looking(self: QueuedReconciler, consumer: str) -> None:
        await look(self, consumer)
        counted["looks"] += 1

    monkeypatch.setattr(ModelDispatcher, "_on_request", counting)
    monkeypatch.setattr(QueuedReconciler, "reconcile", looking)
    async with broker_client(nats_url) as c:
        await c.registry.add_model(mock_model("vectors"))
        for model in ("vectors", "mock", "vectors", "mock"):
            await c.send(model=model)
        async with running(dispatcher.service, dispatcher_settings(nats_url)):
            await eventually(lambda: counted["looks"] > 12)
    assert counted["deliveries"] == 4


async def test_a_leader_whose_index_was_removed_builds_it_anew(nats_url: str) -> None:
    """An operator's mistake must not need a restart."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        await eventually(c.report)
        (index,) = await c.broker.js.consumers_info(topology.REQUESTS)
        await c.broker.js.delete_consumer(topology.REQUESTS, index.name)
        request = await c.send()
        await eventually(lambda: c.terminal(request))


async def test_many_requests_of_many_tenants_all_end_once(nats_url: str) -> None:
    """More than the worker can hold: credit meters them out, each ends exactly once."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=1, sequences=8) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        sending = [c.send(f"p{i}", tenant=f"t{i % 7}", max_tokens=5) for i in range(200)]
        requests = await asyncio.gather(*sending)
        await eventually(lambda: all(c.terminal(r) for r in requests))
        for request in requests:
            kinds = c.record_counts(request)
            assert (kinds["started"], kinds["done"]) == (1, 1)

"""Costs of workers: all of their time is in the ledger, divided over requests and the rest."""

from contextlib import AsyncExitStack
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from gpu_worker import compute_reporter
from streams import topology
from streams.records import usage_sums
from streams.records.usage_rollups import UsageRollups
from streams.records.worker_time import WorkerTime
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

PRICED = {"type": "small", "price_per_hour": "1.2"}
PER_HOUR = 1_200_000  # in 10⁻⁶ of the currency


async def read_times(c: BrokerClient) -> list[WorkerTime]:
    found = await c.broker.read_subject(topology.LEDGER, "infer.worker_time.>")
    return [WorkerTime.unpack(each.data) for each in found]


async def read_costs(c: BrokerClient) -> dict[str, Any]:
    """Sums of `usage --by model --costs` for the one model."""
    rollups = UsageRollups(c.broker)
    await rollups.roll_up()
    days = usage_sums.list_days(*usage_sums.recent_days(c.broker.clock.now()))
    [row] = usage_sums.add_up_costs(await rollups.read_costs(days), "model")
    assert (row["model"], row["type"], row["currency"]) == ("mock", "small", "USD")
    return row


async def test_all_time_of_a_drained_worker_is_told(nats_url: str) -> None:
    """Requests, idle time and loads are together what the worker has taken, to the nanosecond."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        async with running(gpu_worker.service, worker_settings(nats_url, **PRICED)):
            requests = [await c.send(f"prompt {n}", max_tokens=5 + n) for n in range(8)]
            await eventually(lambda: all(c.terminal(each) for each in requests))
            await eventually(c.is_idle)
        records, [told] = await c.ledger(), await read_times(c)
        costs = await read_costs(c)
    assert all(each.compute_ns > 0 for each in records)
    spent = sum(each.compute_ns for each in records)
    assert spent + told.idle_ns + told.load_ns + told.lost_ns == told.elapsed_ns
    assert costs["nanoseconds"] == {
        "worker": told.elapsed_ns,
        "requests": spent,
        "idle": told.idle_ns,
        "load": told.load_ns,
        "lost": told.lost_ns,
        "open": 0,
    }
    assert costs["costs"] == {use: ns * PER_HOUR for use, ns in costs["nanoseconds"].items()}


async def test_an_attempt_that_was_handed_over_costs_too(nats_url: str) -> None:
    """Its worker tells that the time is lost; the request has what its last attempt took."""
    async with (
        broker_client(nats_url, ttft_ms=5, itl_ms=10) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        AsyncExitStack() as stack,
    ):
        hasty = worker_settings(nats_url, **PRICED, drain_seconds=0)
        async with running(gpu_worker.service, hasty):
            request = await c.send("a prompt", max_tokens=200)
            await eventually(lambda: len(c.records.get(request, [])) > 5)
            second = running(gpu_worker.service, worker_settings(nats_url, **PRICED))
            await stack.enter_async_context(second)
        await eventually(lambda: c.terminal(request))
        await eventually(c.is_idle)
        await stack.aclose()
        [record] = await c.ledger()
        costs = await read_costs(c)
    assert record.attempts == 2
    assert costs["nanoseconds"]["requests"] == record.compute_ns > 0
    assert costs["nanoseconds"]["lost"] > 0
    assert costs["nanoseconds"]["open"] == 0


async def test_time_is_told_while_the_worker_runs(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed worker takes its last minute with it, and no more."""
    monkeypatch.setattr(compute_reporter, "REPORT_SECONDS", 0.05)
    async with (
        broker_client(nats_url) as c,
        running(gpu_worker.service, worker_settings(nats_url, **PRICED)),
    ):

        async def told_thrice() -> bool:
            return len(await read_times(c)) >= 3

        await eventually(told_thrice)
        first, second, third = (await read_times(c))[:3]
    assert (second.since, third.since) == (first.until, second.until)
    assert second.elapsed_ns == second.idle_ns > 0

"""Lanes are bounded by the broker, not by what a gateway believes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.errors import LaneFull
from streams.headers import MESSAGE_ID
from streams.records import request_queue
from streams.subjects import Lane, Priority
from tests.support.accounts_server import connect

LANE = Lane("acme", "m.1", Priority.BATCH)
OTHER = Lane("other", "m.1", Priority.BATCH)


@pytest.fixture
async def brokers(nats_url: str) -> AsyncIterator[list[Broker]]:
    async with connect(nats_url, "a") as a, connect(nats_url, "b") as b:
        await declaration.declare(a, topology.Scale(), max_queued=5)
        yield [a, b]


async def outcomes(entering: list[asyncio.Task[object]]) -> tuple[int, int]:
    done = await asyncio.gather(*entering, return_exceptions=True)
    full = sum(isinstance(result, LaneFull) for result in done)
    return len(done) - full, full


async def test_the_stream_bounds_a_lane_and_leaves_the_others(brokers: list[Broker]) -> None:
    """A tenant's backlog is refused by the broker; its neighbour's lane is untouched."""

    async def enter(i: int, lane: Lane) -> object:
        return await request_queue.enqueue(
            brokers[i % 2], lane, b"", {MESSAGE_ID: f"{lane.tenant}{i}"}, 2
        )

    burst = [asyncio.create_task(enter(i, LANE)) for i in range(20)]
    assert await outcomes(burst) == (5, 15)
    assert await outcomes([asyncio.create_task(enter(0, OTHER))]) == (1, 0)


async def test_a_lower_limit_is_exact_over_two_gateways(brokers: list[Broker]) -> None:
    """Twenty at once through two gateways: exactly the limit gets in."""

    async def enter(i: int) -> object:
        headers = {MESSAGE_ID: str(i)}
        return await request_queue.enqueue_below(brokers[i % 2], LANE, b"", headers, 2, limit=3)

    burst = [asyncio.create_task(enter(i)) for i in range(20)]
    assert await outcomes(burst) == (3, 17)
    assert await request_queue.count_queued(brokers[0], LANE) == 3


async def test_a_retry_with_the_same_id_is_queued_once(brokers: list[Broker]) -> None:
    """A gateway that did not hear the confirmation asks again; the broker recognises it."""
    headers = {MESSAGE_ID: "same"}
    first = await request_queue.enqueue(brokers[0], LANE, b"", headers, 2)
    second = await request_queue.enqueue(brokers[1], LANE, b"", headers, 2)
    assert (second.duplicate, second.seq) == (True, first.seq)

"""Keeping a connection's `ClusterClock` right by looks at the brokers' clock.

The leader of the requests is asked, by everybody: so brokers may disagree, and services do not.
"""

import asyncio
from functools import partial
from typing import Protocol

import structlog

from streams.broker.cluster_clock import STEP_SECONDS, ClockSample, ClusterClock
from streams.broker.retry import broker_timeout, retry_forever
from streams.errors import BrokerUnavailable

log = structlog.get_logger()

SYNC_TIMEOUT_SECONDS = 20.0
SAMPLE_SECONDS = 10.0
SUSPECT_SAMPLE_SECONDS = 1.0  # while looks tell of quite another time


class SampledClock(Protocol):
    """A connection that has a cluster clock and can sample the broker's."""

    clock: ClusterClock

    async def sample_clock(self) -> ClockSample: ...


async def sync_clock(broker: SampledClock) -> None:
    """Know the time before serving. Raises `BrokerUnavailable` if nobody tells it for long."""
    async with broker_timeout(SYNC_TIMEOUT_SECONDS):
        await retry_forever(partial(sample_once, broker))


async def sample_once(broker: SampledClock) -> None:
    """Look at the brokers' clock once. Raises `BrokerUnavailable`, also where no stream is."""
    moved = broker.clock.add_sample(await broker.sample_clock())
    if abs(moved) > STEP_SECONDS:
        log.warning("clock_stepped", seconds=round(moved, 3))
    elif broker.clock.is_step_suspected:
        log.warning("clock_step_suspected")


async def keep_synced(broker: SampledClock) -> None:
    """Look now and then, until cancelled; a broker that does not answer is asked later."""
    while True:
        await asyncio.sleep(
            SUSPECT_SAMPLE_SECONDS if broker.clock.is_step_suspected else SAMPLE_SECONDS
        )
        try:
            await sample_once(broker)
        except BrokerUnavailable:
            continue  # what passes meanwhile is measured here

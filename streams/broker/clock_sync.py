"""Keeps a connection's `ClusterClock` right by samples of the broker's clock.

Every service asks the same server, the leader of the stream WORK: the servers' clocks may
disagree, the services' clocks do not.
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
SUSPECT_SAMPLE_SECONDS = 1.0  # while the last sample was a step away from the clock


class SampledClock(Protocol):
    """A connection that has a cluster clock and can ask the broker for the time."""

    clock: ClusterClock

    async def sample_clock(self) -> ClockSample:
        """Ask the broker for the time; raises `BrokerUnavailable` if it does not answer."""
        ...


async def sync_clock(broker: SampledClock) -> None:
    """Wait until the cluster clock has its first sample; call this before serving.

    Retries for `SYNC_TIMEOUT_SECONDS`, then raises `BrokerUnavailable`.
    """
    async with broker_timeout(SYNC_TIMEOUT_SECONDS):
        await retry_forever(partial(sample_once, broker))


async def sample_once(broker: SampledClock) -> None:
    """Ask the broker for the time once, correct the clock by the answer, and log if it jumped.

    Raises `BrokerUnavailable` if there is no answer, also while the stream WORK does not exist.
    """
    change = broker.clock.add_sample(await broker.sample_clock())
    if abs(change) > STEP_SECONDS:
        log.warning("clock_stepped", seconds=round(change, 3))
    elif broker.clock.is_step_suspected:
        log.warning("clock_step_suspected")


async def keep_synced(broker: SampledClock) -> None:
    """Correct the clock by the broker's every `SAMPLE_SECONDS`, until cancelled; never returns.

    While the broker's clock seems to have jumped, it is asked every `SUSPECT_SAMPLE_SECONDS`. If
    the broker does not answer, nothing is raised, and it is asked again at the next turn.
    """
    while True:
        await asyncio.sleep(
            SUSPECT_SAMPLE_SECONDS if broker.clock.is_step_suspected else SAMPLE_SECONDS
        )
        try:
            await sample_once(broker)
        except BrokerUnavailable:
            continue  # the clock runs on by this machine's ticks

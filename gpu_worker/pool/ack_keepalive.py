"""A worker's hold on what it was given: the broker gives it to others when they hear no more."""

import asyncio
import time
from collections.abc import Mapping

import structlog

from gpu_worker.attempt.attempt import Attempt
from gpu_worker.pool.broker_outage import wait_until_cut_off
from streams.broker.connection import Broker
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class AckKeepalive:
    """Keeps hold of `attempts`, which are their owner's."""

    def __init__(self, broker: Broker, attempts: Mapping[str, Attempt]) -> None:
        self._broker, self._attempts = broker, attempts

    async def run(self, seconds: float, ack_wait_seconds: float) -> None:
        """Tell the broker that the work is alive until cancelled; a frozen process falls silent.

        One that wakes up after the ack wait says nothing of what it held before: by now it may be
        somebody else's, whose death it would hide.
        """
        held_at = time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            before, held_at = held_at, time.monotonic()
            try:
                for attempt in list(self._attempts.values()):
                    attempt.may_be_reassigned |= held_at - before > ack_wait_seconds
                    await attempt.extend_ack_wait()
            except BrokerUnavailable as error:
                log.warning("ack_wait_not_extended", reason=str(error))

    async def abandon_when_cut_off(self, ack_wait_seconds: float) -> None:
        """What is held while the worker is cut off is others' by now: compute no more of it."""
        while True:
            await wait_until_cut_off(self._broker, ack_wait_seconds)
            for attempt in self._attempts.values():
                attempt.abandon()
            log.warning("work_abandoned", attempts=len(self._attempts))

"""A worker's hold on what it was given: the broker gives it to others when they hear no more."""

import asyncio
import time
from collections.abc import Mapping

import structlog

from gpu_worker.attempt import Attempt
from gpu_worker.isolation import cut_off
from streams.connection import Broker
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class Hold:
    """Keeps hold of `attempts`, which are their owner's."""

    def __init__(self, broker: Broker, attempts: Mapping[str, Attempt]) -> None:
        self._broker, self._attempts = broker, attempts

    async def keep(self, seconds: float, ack_wait_seconds: float) -> None:
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
                    attempt.lapsed |= held_at - before > ack_wait_seconds
                    await attempt.hold()
            except BrokerUnavailable as error:
                log.warning("work_not_held", reason=str(error))

    async def let_go(self, ack_wait_seconds: float) -> None:
        """What is held while the worker is cut off is others' by now: compute no more of it."""
        while True:
            await cut_off(self._broker, ack_wait_seconds)
            for attempt in self._attempts.values():
                attempt.let_go()
            log.warning("work_let_go", attempts=len(self._attempts))

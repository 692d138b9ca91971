"""Extends the ack wait of accepted work, so that the broker does not redeliver it to others."""

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
    """Keeps the work of `attempts` from being redelivered; the mapping stays its owner's."""

    def __init__(self, broker: Broker, attempts: Mapping[str, Attempt]) -> None:
        self._broker, self._attempts = broker, attempts

    async def run(self, seconds: float, ack_wait_seconds: float) -> None:
        """Report all work as in progress every `seconds`, until cancelled.

        A frozen process falls silent. When it wakes up after the ack wait, it stays silent about
        the work it held before: another worker may have it by now, whose death a report would hide.
        """
        extended_at = time.monotonic()
        while True:
            await asyncio.sleep(seconds)
            before, extended_at = extended_at, time.monotonic()
            try:
                for attempt in list(self._attempts.values()):
                    attempt.may_be_reassigned |= extended_at - before > ack_wait_seconds
                    await attempt.extend_ack_wait()
            except BrokerUnavailable as error:
                log.warning("ack_wait_not_extended", reason=str(error))

    async def abandon_when_cut_off(self, ack_wait_seconds: float) -> None:
        """Abandon all attempts whenever the worker is cut off from the broker, until cancelled.

        Their ack waits have run out by then, so that other workers have the work.
        """
        while True:
            await wait_until_cut_off(self._broker, ack_wait_seconds)
            for attempt in self._attempts.values():
                attempt.abandon()
            log.warning("work_abandoned", attempts=len(self._attempts))

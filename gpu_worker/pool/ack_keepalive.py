"""Extends the ack wait of accepted work, so that the broker does not redeliver it to others."""

import asyncio
import time
from collections.abc import Mapping

import structlog

from gpu_worker.attempt.attempt import Attempt
from gpu_worker.pool.broker_outage import wait_until_cut_off
from streams.broker.broker_client import Broker
from streams.errors import BrokerUnavailable

log = structlog.get_logger()


class AckKeepalive:
    """Keeps the broker from redelivering the work of running attempts to other workers.

    `attempts` are those of one model server, by request id; the mapping is read at each turn and
    never changed here.
    """

    def __init__(self, broker: Broker, attempts: Mapping[str, Attempt]) -> None:
        self._broker, self._attempts = broker, attempts

    async def run(self, seconds: float, ack_wait_seconds: float) -> None:
        """Tell the broker every `seconds` that all work is in progress, until cancelled.

        If the process was frozen for longer than the ack wait, it stays silent about the work that
        it held before: another worker may have that by now, and reports from here would hide that
        worker's death. Nothing is raised while the broker is unavailable.
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
        """Abandon all attempts whenever the worker has lost touch with the broker, until cancelled.

        That is after nearly two ack waits without an answer: other workers have the work by then.
        """
        while True:
            await wait_until_cut_off(self._broker, ack_wait_seconds)
            for attempt in self._attempts.values():
                attempt.abandon()
            log.warning("work_abandoned", attempts=len(self._attempts))

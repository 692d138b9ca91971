"""Keeps the token logs that a worker has finished, so that they can be restored if brokers die.

Token logs are in the memory of brokers. When all of these die at once, a terminal may just have
been stored that no gateway has received, and no worker serves the request any more.
"""

from typing import NamedTuple

import structlog

from streams.errors import BrokerUnavailable
from streams.records.token_log import FinishedLog
from streams.topology import LOG_SECONDS

log = structlog.get_logger()

MAX_BYTES = 8 * 2**20


class _RetainedLog(NamedTuple):
    log: FinishedLog
    added_at: float


class FinishedLogs:
    """The newest finished token logs of one model on this worker, `max_bytes` in all.

    A token log holds the output records of one request. Each is kept for the lifetime of a log on
    the brokers (`LOG_SECONDS`), unless newer logs take its place. `now` is in seconds of any one
    clock.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        # By tenant and request id, oldest first
        self._logs: dict[tuple[str, str], _RetainedLog] = {}
        self._bytes = 0

    def add(self, finished: FinishedLog, now: float) -> None:
        """Keep a finished log, in place of an earlier one of the same request.

        The oldest logs are dropped until the rest fit in `max_bytes` together.
        """
        key = finished.address.tenant, finished.address.request_id
        self._remove(key)
        self._logs[key] = _RetainedLog(finished, now)
        self._bytes += len(finished.packed)
        self._trim(now)

    def get(self, tenant: str, request_id: str, now: float) -> FinishedLog | None:
        """Return the finished log of a tenant's request, or None if it is not kept here."""
        self._trim(now)
        retained = self._logs.get((tenant, request_id))
        return retained.log if retained else None

    def _trim(self, now: float) -> None:
        while self._bytes > self._max_bytes or self._oldest_at < now - LOG_SECONDS:
            self._remove(next(iter(self._logs)))

    @property
    def _oldest_at(self) -> float:
        return next((retained.added_at for retained in self._logs.values()), float("inf"))

    def _remove(self, key: tuple[str, str]) -> None:
        if retained := self._logs.pop(key, None):
            self._bytes -= len(retained.log.packed)


async def restore_log(finished: FinishedLog) -> None:
    """Store again on the broker those records of a finished log that the broker has lost.

    Best effort: `BrokerUnavailable` is logged and not raised, since a reader that misses the log
    asks again. Changes nothing if no record is missing.
    """
    try:
        await finished.restore()
    except BrokerUnavailable as error:
        log.warning("log_not_restored", request_id=finished.address.request_id, reason=str(error))

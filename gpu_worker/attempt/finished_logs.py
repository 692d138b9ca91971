"""The logs that a worker has ended, while somebody may still miss them.

Token logs are in the memory of brokers. When all of these die at once, an end may just have been
stored that no gateway has heard of, and no worker serves the request any more.
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
    at: float


class FinishedLogs:
    """The newest, of so many bytes, for as long as a log lives. Times are of any one clock."""

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self._most = most_bytes
        self._logs: dict[
            tuple[str, str], _RetainedLog
        ] = {}  # by tenant and request id, oldest first
        self._bytes = 0

    def add(self, ended: FinishedLog, now: float) -> None:
        key = ended.address.tenant, ended.address.request_id
        self._remove(key)
        self._logs[key] = _RetainedLog(ended, now)
        self._bytes += len(ended.packed)
        self._trim(now)

    def get(self, tenant: str, request_id: str, now: float) -> FinishedLog | None:
        self._trim(now)
        ended = self._logs.get((tenant, request_id))
        return ended.log if ended else None

    def _trim(self, now: float) -> None:
        while self._bytes > self._most or self._oldest_at < now - LOG_SECONDS:
            self._remove(next(iter(self._logs)))

    @property
    def _oldest_at(self) -> float:
        return next((ended.at for ended in self._logs.values()), float("inf"))

    def _remove(self, key: tuple[str, str]) -> None:
        if ended := self._logs.pop(key, None):
            self._bytes -= len(ended.log.packed)


async def restore_log(ended: FinishedLog) -> None:
    """Store what the brokers have lost of it, if they answer: who misses it asks again."""
    try:
        await ended.restore()
    except BrokerUnavailable as error:
        log.warning("log_not_restored", request_id=ended.address.request_id, reason=str(error))

"""The logs that a worker has ended, while somebody may still miss them.

Token logs are in the memory of brokers. When all of these die at once, an end may just have been
stored that no gateway has heard of, and no worker serves the request any more.
"""

from typing import NamedTuple

import structlog

from streams.errors import BrokerUnavailable
from streams.token_log import EndedLog
from streams.topology import LOG_SECONDS

log = structlog.get_logger()

MOST_BYTES = 8 * 2**20


class _Ended(NamedTuple):
    log: EndedLog
    at: float


class EndedLogs:
    """The newest, of so many bytes, for as long as a log lives. Times are of any one clock."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._ended: dict[tuple[str, str], _Ended] = {}  # by tenant and request id, oldest first
        self._bytes = 0

    def keep(self, ended: EndedLog, now: float) -> None:
        key = ended.address.tenant, ended.address.request_id
        self._forget(key)
        self._ended[key] = _Ended(ended, now)
        self._bytes += len(ended.packed)
        self._trim(now)

    def get(self, tenant: str, request_id: str, now: float) -> EndedLog | None:
        self._trim(now)
        ended = self._ended.get((tenant, request_id))
        return ended.log if ended else None

    def _trim(self, now: float) -> None:
        while self._bytes > self._most or self._oldest_at < now - LOG_SECONDS:
            self._forget(next(iter(self._ended)))

    @property
    def _oldest_at(self) -> float:
        return next((ended.at for ended in self._ended.values()), float("inf"))

    def _forget(self, key: tuple[str, str]) -> None:
        if ended := self._ended.pop(key, None):
            self._bytes -= len(ended.log.packed)


async def put_back(ended: EndedLog) -> None:
    """Store what the brokers have lost of it, if they answer: who misses it asks again."""
    try:
        await ended.put_back()
    except BrokerUnavailable as error:
        log.warning("log_not_put_back", request_id=ended.address.request_id, reason=str(error))

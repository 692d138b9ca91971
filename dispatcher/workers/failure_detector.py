"""Tells workers that have died from those that are only silent.

The kernel closes the connections of a process that dies, and the broker answers at once for who is
not connected. A worker that is frozen, or cut off, still is: its ack wait tells.
"""

import asyncio
from collections.abc import Sequence

from streams import subjects
from streams.broker.connection import Broker

CHECK_SECONDS = 0.1
DEAD_AFTER_SECONDS = 0.5  # a worker whose broker has died is at another one sooner
SETTLE_SECONDS = 2.0  # from when this process came to a broker itself, until others have, too
_ANSWER_SECONDS = 0.25


class FailureDetector:
    """Asks for the workers that it is told of; times are monotonic seconds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._absent_since: dict[str, float] = {}  # since when

    async def find_dead(self, silent: Sequence[str], now: float) -> list[str]:
        """Which of these have been connected nowhere for `ABSENT_SECONDS`, at every look."""
        if now - self._broker.connected_at < SETTLE_SECONDS:
            silent = ()
        asked = [self._broker.has_listener(subjects.alive(w), _ANSWER_SECONDS) for w in silent]
        there = await asyncio.gather(*asked)
        absent = [worker for worker, is_there in zip(silent, there, strict=True) if not is_there]
        self._absent_since = {worker: self._absent_since.get(worker, now) for worker in absent}
        return [w for w, since in self._absent_since.items() if now - since >= DEAD_AFTER_SECONDS]

"""Tells workers that have died from those that are only silent, by asking the broker.

The kernel closes the connections of a process that dies, and the broker answers at once for a
worker that is not connected. A worker that is frozen, or cut off, still counts as connected: its
ack wait tells.
"""

import asyncio
from collections.abc import Sequence

from streams import subjects
from streams.broker.broker_client import Broker

CHECK_SECONDS = 0.1
DEAD_AFTER_SECONDS = 0.5  # a worker whose broker has died reconnects to another one sooner
SETTLE_SECONDS = 2.0  # after this process connected itself, until others have reconnected, too
_ANSWER_SECONDS = 0.25
_CONFIRM_TRIES = 4  # for a broker that has yet to notice that a connection is closed


class FailureDetector:
    """Finds dead workers among late ones, by asking the broker whether they are connected.

    A late worker holds requests and has sent no heartbeat for a while. A worker whose process has
    died is not connected; one that is frozen, or cut off from the network, still counts as
    connected. The model's leader owns the detector. Times are monotonic seconds.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._absent_since: dict[str, float] = {}  # monotonic seconds, by worker

    async def is_dead(self, worker: str) -> bool:
        """Return whether the broker confirms at once that a worker said to have died is gone.

        False if the worker answers, and if for a second neither it nor the broker does: it may be
        frozen or cut off. Whoever tells of a death may do so before the broker has noticed it, so
        the question is repeated.
        """
        for _ in range(_CONFIRM_TRIES):
            listens = await self._broker.has_listener(subjects.alive(worker), _ANSWER_SECONDS)
            if listens is not None:
                return not listens
        return False

    async def find_dead(self, late: Sequence[str], now: float) -> list[str]:
        """Return those of the `late` workers that were not connected for `DEAD_AFTER_SECONDS`.

        Call it every `CHECK_SECONDS` (0.1 s) with all late workers. A worker is dead if at every
        call for 0.5 s the broker says that it is not connected; the time of a worker that is left
        out, or is connected, starts anew. Waits a quarter of a second at most; a worker for which
        no answer comes counts as connected. Returns an empty list within `SETTLE_SECONDS` (2 s) of
        this process's own connection to a broker.
        """
        if now - self._broker.connected_at < SETTLE_SECONDS:
            late = ()
        asked = [self._broker.has_listener(subjects.alive(w), _ANSWER_SECONDS) for w in late]
        listening = await asyncio.gather(*asked)
        absent = [worker for worker, it in zip(late, listening, strict=True) if it is False]
        self._absent_since = {worker: self._absent_since.get(worker, now) for worker in absent}
        return [w for w, since in self._absent_since.items() if now - since >= DEAD_AFTER_SECONDS]

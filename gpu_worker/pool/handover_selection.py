"""Chooses the attempts that a draining worker hands over to peers that have free capacity."""

import time
from collections.abc import Iterable, Iterator

from gpu_worker.attempt.attempt import Attempt
from gpu_worker.pool.peer_heartbeats import PeerHeartbeats


class Handover(PeerHeartbeats):
    """Chooses, while a worker drains, which of its attempts to leave to other workers.

    Used once for each drain of a model server, as an async context manager.
    """

    def choose_attempts(self, attempts: Iterable[Attempt], seconds: float) -> Iterator[Attempt]:
        """Yield attempts that would not end here within `seconds` and that a peer could take now.

        Attempts that were told to stop are left out. Those without a measured pace come first, then
        those that would take longest. Each attempt yielded is counted against the free capacity of
        a peer; the caller has to stop it. Yields nothing while no peer is known.
        """
        for attempt in sorted(attempts, key=_seconds_left, reverse=True):
            is_late = attempt.is_active and _seconds_left(attempt) > seconds
            if is_late and self.capacity.reserve(attempt.envelope.cost, time.monotonic()):
                yield attempt


def _seconds_left(attempt: Attempt) -> float:
    """Return the seconds until the attempt's end; infinite while that cannot be told."""
    seconds = attempt.seconds_left
    return float("inf") if seconds is None else seconds

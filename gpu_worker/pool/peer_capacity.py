"""The other workers of a pool, as their beats tell: who could take over a request. Pure."""

from dataclasses import dataclass

from gpu_worker.identity import WorkerIdentity
from streams.messages import Heartbeat

STALE_SECONDS = 3.0  # three missed beats: as the dispatcher has it


@dataclass(slots=True)
class _Peer:
    sequences: int
    tokens: int
    heard_at: float


class PeerCapacity:
    """Their room for requests; times are seconds of any monotonic clock, given by the caller."""

    def __init__(self, who: WorkerIdentity) -> None:
        self._identity = who
        self._peers: dict[str, _Peer] = {}

    def record_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat; those of this worker, and of other versions, mean nothing."""
        if beat.worker == self._identity.worker or beat.version != self._identity.version:
            return
        self._peers.pop(beat.worker, None)
        if beat.resident and not beat.draining:
            free = beat.free_sequences - beat.waiting
            self._peers[beat.worker] = _Peer(free, beat.free_tokens, now)

    def reserve(self, cost: int, now: float) -> bool:
        """Count on one of them to take over a request of so many tokens; False if none has room."""
        for room in self._peers.values():
            if now - room.heard_at < STALE_SECONDS and room.sequences > 0 and cost <= room.tokens:
                room.sequences -= 1
                room.tokens -= cost
                return True
        return False

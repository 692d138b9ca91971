"""The other workers of a pool, as their beats tell: who could take over a request. Pure."""

from dataclasses import dataclass

from gpu_worker.outcome import Identity
from streams.messages import Beat

STALE_SECONDS = 3.0  # three missed beats: as the dispatcher has it


@dataclass(slots=True)
class _Room:
    sequences: int
    tokens: int
    heard: float


class Fellows:
    """Their room for requests; times are seconds of any monotonic clock, given by the caller."""

    def __init__(self, who: Identity) -> None:
        self._who = who
        self._rooms: dict[str, _Room] = {}

    def beat(self, beat: Beat, now: float) -> None:
        """Take in a heartbeat; those of this worker, and of other versions, mean nothing."""
        if beat.worker == self._who.worker or beat.version != self._who.version:
            return
        self._rooms.pop(beat.worker, None)
        if beat.resident and not beat.draining:
            free = beat.free_sequences - beat.waiting
            self._rooms[beat.worker] = _Room(free, beat.free_tokens, now)

    def take(self, cost: int, now: float) -> bool:
        """Count on one of them to take over a request of so many tokens; False if none has room."""
        for room in self._rooms.values():
            if now - room.heard < STALE_SECONDS and room.sequences > 0 and cost <= room.tokens:
                room.sequences -= 1
                room.tokens -= cost
                return True
        return False

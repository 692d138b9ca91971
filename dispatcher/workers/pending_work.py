"""What lies in WORK and has not been pulled: for whoever has room, or for one worker. Pure."""

import heapq
from dataclasses import dataclass, field

from streams.subjects import ANY, Priority

_LEAST_URGENT_FIRST = tuple(reversed(Priority))


@dataclass(slots=True)
class FleetCapacity:
    """Sequences and tokens that are free, or are waited for (negative)."""

    sequences: int = 0
    tokens: int = 0

    def adjust(self, sign: int, sequences: int, tokens: int) -> None:
        self.sequences += sign * sequences
        self.tokens += sign * tokens


def empty_by_priority() -> dict[Priority, FleetCapacity]:
    return {priority: FleetCapacity() for priority in Priority}


@dataclass(slots=True)
class ReservedCapacity:
    """Room that is spoken for, as each priority sees it."""

    by_priority: dict[Priority, FleetCapacity] = field(default_factory=empty_by_priority)

    def adjust(self, sign: int, priority: Priority, cost: int) -> None:
        """What is sent takes the room of its own priority, and what less urgent work may take."""
        for p in _LEAST_URGENT_FIRST:
            self.by_priority[p].adjust(sign, 1, cost)
            if p is priority:
                return


_NOTHING_RESERVED = ReservedCapacity()


@dataclass(slots=True)
class _SharedPending:
    """Work for anybody, of one priority: a heap of (sequence, cost)."""

    waiting: list[tuple[int, int]] = field(default_factory=list)
    pulled_up_to: int = 0  # everything up to this sequence has been


@dataclass(slots=True)
class _WorkerPending:
    """Work for one worker: by sequence its priority and cost; `taken` is also on its way there."""

    waiting: dict[int, tuple[Priority, int]] = field(default_factory=dict)
    reserved: ReservedCapacity = field(default_factory=ReservedCapacity)


class PendingWork:
    """What was put into WORK and not pulled yet, or is about to be put there, for one pool."""

    def __init__(self) -> None:
        self.reserved = ReservedCapacity()
        self._shared = {priority: _SharedPending() for priority in Priority}
        self._by_worker: dict[str, _WorkerPending] = {}

    def reserve(self, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Something is about to be put there: its room is taken."""
        self._adjust(+1, priority, cost, placement)

    def release(self, priority: Priority, cost: int, placement: str = ANY) -> None:
        """It was not put there, or has been pulled."""
        self._adjust(-1, priority, cost, placement)

    def place(self, priority: Priority, cost: int, worker: str) -> None:
        """What is about to be put there is for this worker."""
        self._get_worker(worker).reserved.adjust(+1, priority, cost)

    def mark_published(self, priority: Priority, seq: int, cost: int, placement: str = ANY) -> None:
        """It lies there, as message `seq`."""
        if placement != ANY:
            self._by_worker[placement].waiting[seq] = priority, cost
            return
        lane = self._shared[priority]
        heapq.heappush(lane.waiting, (seq, cost))
        self.mark_pulled(
            priority, lane.pulled_up_to
        )  # a beat may have been faster than the broker's answer

    def mark_pulled(self, priority: Priority, seq: int) -> None:
        """Of the work for anybody everything of a priority up to this one has been."""
        lane = self._shared[priority]
        lane.pulled_up_to = max(lane.pulled_up_to, seq)
        while lane.waiting and lane.waiting[0][0] <= lane.pulled_up_to:
            self._adjust(-1, priority, heapq.heappop(lane.waiting)[1], ANY)

    def mark_pulled_by(self, worker: str, seq: int) -> None:
        """Of the work for this worker everything up to this one has been."""
        waiting = self._by_worker[worker].waiting if worker in self._by_worker else {}
        for entry in [each for each in waiting if each <= seq]:
            self._drop_for_worker(worker, entry)

    def discard(self, sequences: set[int]) -> None:
        """These are not in WORK any more."""
        for priority, lane in self._shared.items():
            gone = [entry for entry in lane.waiting if entry[0] in sequences]
            for entry in gone:
                lane.waiting.remove(entry)
                self._adjust(-1, priority, entry[1], ANY)
            heapq.heapify(lane.waiting)
        for worker, own in list(self._by_worker.items()):
            for seq in sequences & own.waiting.keys():
                self._drop_for_worker(worker, seq)

    def reserved_for_worker(self, worker: str) -> ReservedCapacity:
        """What is for one worker alone."""
        own = self._by_worker.get(worker)
        return own.reserved if own else _NOTHING_RESERVED

    def reserved_for_any(self, priority: Priority) -> int:
        """Tokens, as a priority sees them, of what is for whoever has room."""
        placed = sum(own.reserved.by_priority[priority].tokens for own in self._by_worker.values())
        return self.reserved.by_priority[priority].tokens - placed

    @property
    def sequences(self) -> set[int]:
        for_anybody = {seq for lane in self._shared.values() for seq, _ in lane.waiting}
        return for_anybody.union(*(own.waiting for own in self._by_worker.values()))

    def _get_worker(self, worker: str) -> _WorkerPending:
        if (own := self._by_worker.get(worker)) is None:
            own = self._by_worker[worker] = _WorkerPending()
        return own

    def _drop_for_worker(self, worker: str, seq: int) -> None:
        priority, cost = self._by_worker[worker].waiting.pop(seq)
        self._adjust(-1, priority, cost, worker)

    def _adjust(self, sign: int, priority: Priority, cost: int, placement: str) -> None:
        self.reserved.adjust(sign, priority, cost)
        if placement != ANY:
            own = self._get_worker(placement)
            own.reserved.adjust(sign, priority, cost)
            if not own.reserved.by_priority[Priority.BATCH].sequences:
                del self._by_worker[placement]

"""What lies in WORK and has not been pulled: for whoever has room, or for one worker. Pure."""

import heapq
from dataclasses import dataclass, field

from streams.subjects import ANY, Priority

_LEAST_URGENT_FIRST = tuple(reversed(Priority))


@dataclass(slots=True)
class Credit:
    """Sequences and tokens that are free, or are waited for (negative)."""

    sequences: int = 0
    tokens: int = 0

    def count(self, sign: int, sequences: int, tokens: int) -> None:
        self.sequences += sign * sequences
        self.tokens += sign * tokens


def by_priority() -> dict[Priority, Credit]:
    return {priority: Credit() for priority in Priority}


@dataclass(slots=True)
class Taken:
    """Room that is spoken for, as each priority sees it."""

    of: dict[Priority, Credit] = field(default_factory=by_priority)

    def count(self, sign: int, priority: Priority, cost: int) -> None:
        """What is sent takes the room of its own priority, and what less urgent work may take."""
        for p in _LEAST_URGENT_FIRST:
            self.of[p].count(sign, 1, cost)
            if p is priority:
                return


_NOTHING = Taken()


@dataclass(slots=True)
class _Lane:
    """Work for anybody, of one priority: a heap of (sequence, cost)."""

    waiting: list[tuple[int, int]] = field(default_factory=list)
    pulled: int = 0  # everything up to this sequence has been


@dataclass(slots=True)
class _Own:
    """Work for one worker: by sequence its priority and cost; `taken` is also on its way there."""

    waiting: dict[int, tuple[Priority, int]] = field(default_factory=dict)
    taken: Taken = field(default_factory=Taken)


class Unpulled:
    """What was put into WORK and not pulled yet, or is about to be put there, for one pool."""

    def __init__(self) -> None:
        self.taken = Taken()
        self._lanes = {priority: _Lane() for priority in Priority}
        self._own: dict[str, _Own] = {}

    def sending(self, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Something is about to be put there: its room is taken."""
        self._count(+1, priority, cost, placement)

    def not_sent(self, priority: Priority, cost: int, placement: str = ANY) -> None:
        """It was not put there, or has been pulled."""
        self._count(-1, priority, cost, placement)

    def place(self, priority: Priority, cost: int, worker: str) -> None:
        """What is about to be put there is for this worker."""
        self._own_of(worker).taken.count(+1, priority, cost)

    def sent(self, priority: Priority, seq: int, cost: int, placement: str = ANY) -> None:
        """It lies there, as message `seq`."""
        if placement != ANY:
            self._own[placement].waiting[seq] = priority, cost
            return
        lane = self._lanes[priority]
        heapq.heappush(lane.waiting, (seq, cost))
        self.pulled(priority, lane.pulled)  # a beat may have been faster than the broker's answer

    def pulled(self, priority: Priority, seq: int) -> None:
        """Of the work for anybody everything of a priority up to this one has been."""
        lane = self._lanes[priority]
        lane.pulled = max(lane.pulled, seq)
        while lane.waiting and lane.waiting[0][0] <= lane.pulled:
            self._count(-1, priority, heapq.heappop(lane.waiting)[1], ANY)

    def pulled_own(self, worker: str, seq: int) -> None:
        """Of the work for this worker everything up to this one has been."""
        waiting = self._own[worker].waiting if worker in self._own else {}
        for entry in [each for each in waiting if each <= seq]:
            self._drop_own(worker, entry)

    def left(self, sequences: set[int]) -> None:
        """These are not in WORK any more."""
        for priority, lane in self._lanes.items():
            gone = [entry for entry in lane.waiting if entry[0] in sequences]
            for entry in gone:
                lane.waiting.remove(entry)
                self._count(-1, priority, entry[1], ANY)
            heapq.heapify(lane.waiting)
        for worker, own in list(self._own.items()):
            for seq in sequences & own.waiting.keys():
                self._drop_own(worker, seq)

    def for_worker(self, worker: str) -> Taken:
        """What is for one worker alone."""
        own = self._own.get(worker)
        return own.taken if own else _NOTHING

    def for_any(self, priority: Priority) -> int:
        """Tokens, as a priority sees them, of what is for whoever has room."""
        placed = sum(own.taken.of[priority].tokens for own in self._own.values())
        return self.taken.of[priority].tokens - placed

    @property
    def sequences(self) -> set[int]:
        for_anybody = {seq for lane in self._lanes.values() for seq, _ in lane.waiting}
        return for_anybody.union(*(own.waiting for own in self._own.values()))

    def _own_of(self, worker: str) -> _Own:
        if (own := self._own.get(worker)) is None:
            own = self._own[worker] = _Own()
        return own

    def _drop_own(self, worker: str, seq: int) -> None:
        priority, cost = self._own[worker].waiting.pop(seq)
        self._count(-1, priority, cost, worker)

    def _count(self, sign: int, priority: Priority, cost: int, placement: str) -> None:
        self.taken.count(sign, priority, cost)
        if placement != ANY:
            own = self._own_of(placement)
            own.taken.count(sign, priority, cost)
            if not own.taken.of[Priority.BATCH].sequences:
                del self._own[placement]

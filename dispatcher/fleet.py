"""The fleet of one model as its beats tell: who is there, and how much it may be sent. Pure.

Credit is derived, never counted up and down on its own: what the workers say is free, less what was
dispatched and, by their own account, has not been pulled yet. It is told by priority, since engines
take the place of less urgent work for more urgent.
"""

import heapq
from dataclasses import dataclass, field

from streams.messages import Beat
from streams.subjects import Priority

STALE_SECONDS = 3.0  # three missed beats: its credit is not trusted any more
PREFETCH = 2  # requests per worker that may wait in WORK, so that a freed slot is filled at once
_LEAST_URGENT_FIRST = tuple(reversed(Priority))


@dataclass(slots=True)
class _Lane:
    """Work of one priority that has not been pulled: a heap of (sequence, cost)."""

    waiting: list[tuple[int, int]] = field(default_factory=list)
    pulled: int = 0  # everything up to this sequence has been


@dataclass(slots=True)
class Credit:
    """Sequences and tokens that are free, or are waited for (negative)."""

    sequences: int = 0
    tokens: int = 0

    def count(self, sign: int, sequences: int, tokens: int) -> None:
        self.sequences += sign * sequences
        self.tokens += sign * tokens


def _by_priority() -> dict[Priority, Credit]:
    return {priority: Credit() for priority in Priority}


@dataclass(slots=True)
class _Unpulled:
    """What was put into WORK and not pulled yet, or is about to be put there, by priority."""

    lanes: dict[Priority, _Lane] = field(default_factory=lambda: {p: _Lane() for p in Priority})
    taken: dict[Priority, Credit] = field(default_factory=_by_priority)

    def count(self, sign: int, priority: Priority, cost: int) -> None:
        """What is sent takes the room of its own priority, and what less urgent work may take."""
        for p in _LEAST_URGENT_FIRST:
            self.taken[p].count(sign, 1, cost)
            if p is priority:
                return

    def sent(self, priority: Priority, seq: int, cost: int) -> None:
        lane = self.lanes[priority]
        heapq.heappush(lane.waiting, (seq, cost))
        self.pulled(priority, lane.pulled)  # a beat may have been faster than the broker's answer

    def pulled(self, priority: Priority, seq: int) -> None:
        lane = self.lanes[priority]
        lane.pulled = max(lane.pulled, seq)
        while lane.waiting and lane.waiting[0][0] <= lane.pulled:
            self.count(-1, priority, heapq.heappop(lane.waiting)[1])

    def left(self, sequences: set[int]) -> None:
        for priority, lane in self.lanes.items():
            gone = [entry for entry in lane.waiting if entry[0] in sequences]
            for entry in gone:
                lane.waiting.remove(entry)
                self.count(-1, priority, entry[1])
            heapq.heapify(lane.waiting)


@dataclass(slots=True)
class _Pool:
    """The sums over one version's workers, but those that drain."""

    workers: int = 0
    yielding: int = 0  # of the workers, those whose batch work gives way
    yields: bool = True  # all do
    whole: Credit = field(default_factory=Credit)
    free: dict[Priority, Credit] = field(default_factory=_by_priority)
    unpulled: _Unpulled = field(default_factory=_Unpulled)

    def count(self, sign: int, beat: Beat) -> None:
        if beat.draining:
            return
        self.workers += sign
        self.yielding += sign * bool(beat.room)
        self.yields = self.yielding == self.workers
        self.whole.count(sign, beat.max_sequences, beat.kv_tokens)
        for priority, free in self.free.items():
            free.count(sign, *beat.room_for(priority))

    def fits(self, priority: Priority, cost: int) -> bool:
        free, taken = self.free[priority], self._taken(priority)
        prefetch = PREFETCH * self.workers
        if taken.sequences - min(0, free.sequences) < prefetch:
            return True
        places = free.sequences - taken.sequences + prefetch
        return places > 0 and cost <= free.tokens - taken.tokens

    def spare(self, priority: Priority, cost: int) -> float:
        free, taken = self.free[priority], self._taken(priority)
        sequences = (free.sequences - taken.sequences - 1) / max(1, self.whole.sequences)
        return min(sequences, (free.tokens - taken.tokens - cost) / max(1, self.whole.tokens))

    def room(self, priority: Priority) -> tuple[int, int]:
        """Sequences and tokens that would run at once."""
        free, taken = self.free[priority], self._taken(priority)
        return max(0, free.sequences - taken.sequences), max(0, free.tokens - taken.tokens)

    def _taken(self, priority: Priority) -> Credit:
        """What has been sent and may not give way to this priority."""
        return self.unpulled.taken[priority if self.yields else Priority.BATCH]


class Fleet:
    """Beats in, credit out. Times are seconds of any monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._beats: dict[str, tuple[Beat, float]] = {}
        self._pools: dict[str, _Pool] = {}

    def beat(self, beat: Beat, now: float) -> None:
        """Take in a heartbeat; what it has pulled is no longer waiting."""
        self._forget(beat.worker)
        self._beats[beat.worker] = beat, now
        pool = self._pool(beat.version)
        pool.count(+1, beat)
        for priority, pulled in beat.pulled.items():
            pool.unpulled.pulled(Priority(priority), pulled)

    def sending(self, version: str, priority: Priority, cost: int) -> None:
        """Something is about to be put into WORK: its room is taken."""
        self._pool(version).unpulled.count(+1, priority, cost)

    def not_sent(self, version: str, priority: Priority, cost: int) -> None:
        """It was not put there, or lies there already."""
        self._pool(version).unpulled.count(-1, priority, cost)

    def sent(self, version: str, priority: Priority, seq: int, cost: int) -> None:
        """It lies in WORK as message `seq`, until a worker says that it has pulled so far."""
        self._pool(version).unpulled.sent(priority, seq, cost)

    @property
    def unpulled(self) -> set[int]:
        """Sequences in WORK that nobody has pulled, as far as is known."""
        pools = self._pools.values()
        lanes = (lane for pool in pools for lane in pool.unpulled.lanes.values())
        return {seq for lane in lanes for seq, _ in lane.waiting}

    def left(self, sequences: set[int]) -> None:
        """The broker's own account: these are not in WORK any more."""
        for pool in self._pools.values():
            pool.unpulled.left(sequences)

    def workers(self) -> list[Beat]:
        """The last beats of the workers that are there."""
        return [beat for beat, _ in self._beats.values()]

    def forget_stale(self, now: float) -> list[str]:
        """Drop and name the workers that have fallen silent; their credit counts no more."""
        silent = [name for name, (_, at) in self._beats.items() if now - at >= STALE_SECONDS]
        for name in silent:
            self._forget(name)
        return silent

    def fits(self, version: str, priority: Priority, cost: int) -> bool:
        """True if the pool of a version may be sent a request of this cost now."""
        return version in self._pools and self._pools[version].fits(priority, cost)

    def room(self, priority: Priority) -> Credit:
        """What would run at once, over all pools."""
        room = Credit()
        for pool in self._pools.values():
            room.count(+1, *pool.room(priority))
        return room

    def is_free(self, version: str, priority: Priority) -> bool:
        """True if workers of a pool say that they have room, whatever is on its way to them."""
        free = self._pools[version].free[priority] if version in self._pools else Credit()
        return free.sequences > 0 and free.tokens > 0

    def yields(self, version: str) -> bool:
        """True if a pool's batch work gives way to what is more urgent."""
        return version in self._pools and self._pools[version].yields

    def spare(self, version: str, priority: Priority, cost: int) -> float:
        """The share of a pool's room that stays free when it is sent this request, 1 at most."""
        return self._pools[version].spare(priority, cost)

    @property
    def whole(self) -> Credit:
        """The room of all workers, in use or not."""
        whole = Credit()
        for pool in self._pools.values():
            whole.count(+1, pool.whole.sequences, pool.whole.tokens)
        return whole

    def _pool(self, version: str) -> _Pool:
        if (pool := self._pools.get(version)) is None:
            pool = self._pools[version] = _Pool()
        return pool

    def _forget(self, worker: str) -> None:
        if known := self._beats.pop(worker, None):
            self._pools[known[0].version].count(-1, known[0])

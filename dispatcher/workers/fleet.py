"""The fleet of one model as its beats tell: who is there, and how much it may be sent. Pure.

Credit is derived, never counted up and down on its own: what the workers say is free, less what was
dispatched and, by their own account, has not been pulled yet. It is told by priority, since engines
take the place of less urgent work for more urgent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dispatcher.workers.pending_work import FleetCapacity, PendingWork, empty_by_priority
from streams.messages import Heartbeat
from streams.subjects import ANY, Priority

LATE_HEARTBEAT_SECONDS = 0.35  # a worker that holds something beats every 0.2 s
STALE_HEARTBEAT_SECONDS = 3.0  # three missed beats: its credit is not trusted any more
# Requests per worker that may wait in WORK, so that a freed slot is filled at once
PREFETCH_PER_WORKER = 2
LARGE_REQUEST_FRACTION = (
    1 / 8
)  # of a worker's KV: a request from there on is not sent before one has room for it
_Member = tuple[str, str]  # a worker, and one of the versions that it serves, each with its room


class WorkerCapacity(NamedTuple):
    """What a worker has room for at once, with what was placed on it counted as there.

    `places` are negative where requests wait for one; `ahead` are the tokens by which it holds
    more than its part of what the pool holds.
    """

    free_sequences: int
    free_tokens: int
    excess_tokens: float

    def can_accept(self, cost: int, prefetch: int = 0) -> bool:
        """Whether a request would run there, behind at most so many others that wait."""
        return self.free_sequences + prefetch > 0 and (prefetch > 0 or cost <= self.free_tokens)


@dataclass(slots=True)
class _VersionPool:
    """The sums over one version's workers, but those that drain."""

    workers: int = 0
    preempting_workers: int = 0  # of the workers, those whose batch work gives way
    preempts_batch: bool = True  # all do
    total: FleetCapacity = field(default_factory=FleetCapacity)
    free: dict[Priority, FleetCapacity] = field(default_factory=empty_by_priority)
    pending: PendingWork = field(default_factory=PendingWork)

    def adjust(self, sign: int, beat: Heartbeat) -> None:
        if beat.draining:
            return
        self.workers += sign
        self.preempting_workers += sign * bool(beat.room)
        self.preempts_batch = self.preempting_workers == self.workers
        self.total.adjust(sign, beat.max_sequences, beat.kv_tokens)
        for priority, free in self.free.items():
            free.adjust(sign, *beat.free_capacity(priority))

    def has_room_for(self, priority: Priority, cost: int) -> bool:
        free, taken = self.free[priority], self._reserved(priority)
        prefetch = PREFETCH_PER_WORKER * self.workers
        if taken.sequences - min(0, free.sequences) < prefetch:
            return True
        places = free.sequences - taken.sequences + prefetch
        return places > 0 and cost <= free.tokens - taken.tokens

    def free_fraction_after(self, priority: Priority, cost: int) -> float:
        free, taken = self.free[priority], self._reserved(priority)
        sequences = (free.sequences - taken.sequences - 1) / max(1, self.total.sequences)
        return min(sequences, (free.tokens - taken.tokens - cost) / max(1, self.total.tokens))

    def free_capacity(self, priority: Priority) -> tuple[int, int]:
        """Sequences and tokens that would run at once."""
        free, taken = self.free[priority], self._reserved(priority)
        return max(0, free.sequences - taken.sequences), max(0, free.tokens - taken.tokens)

    def free_sequences(self, priority: Priority) -> int:
        """Sequences that would run at once beside what was sent; negative where some wait."""
        return self.free[priority].sequences - self._reserved(priority).sequences

    def _reserved(self, priority: Priority) -> FleetCapacity:
        """What has been sent and may not give way to this priority."""
        return self.pending.reserved.by_priority[self._effective_priority(priority)]

    def worker_capacity(self, beat: Heartbeat, priority: Priority) -> WorkerCapacity:
        """How one of its workers stands, for work of this priority."""
        sequences, tokens = beat.free_capacity(priority)
        own = self.pending.reserved_for_worker(beat.worker)
        taken, placed = (
            own.by_priority[self._effective_priority(priority)],
            own.by_priority[Priority.BATCH],
        )
        held = beat.kv_tokens - beat.free_tokens + placed.tokens
        part = beat.kv_tokens / max(1, self.total.tokens) * self._held_tokens
        return WorkerCapacity(sequences - taken.sequences, tokens - taken.tokens, held - part)

    def reserved_for_any(self, priority: Priority) -> int:
        """Tokens that are under way to any worker, and may not give way to this priority."""
        return self.pending.reserved_for_any(self._effective_priority(priority))

    @property
    def _held_tokens(self) -> int:
        """Tokens that its workers hold, or are sent."""
        everything = Priority.BATCH
        free, taken = self.free[everything], self.pending.reserved.by_priority[everything]
        return self.total.tokens - free.tokens + taken.tokens

    def _effective_priority(self, priority: Priority) -> Priority:
        """Whose view this priority has of what was sent: nothing gives way where not all do."""
        return priority if self.preempts_batch else Priority.BATCH


class Fleet:
    """Beats in, credit out. Times are seconds of any monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._beats: dict[_Member, tuple[Heartbeat, float]] = {}
        self._pools: dict[str, _VersionPool] = {}

    def apply_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat; what it has pulled is no longer waiting."""
        member = beat.worker, beat.version
        self._drop_member(member)
        self._beats[member] = beat, now
        pool = self._pool(beat.version)
        pool.adjust(+1, beat)
        for priority, pulled in beat.pulled.items():
            pool.pending.mark_pulled(Priority(priority), pulled)
        pool.pending.mark_pulled_by(beat.worker, beat.pulled_own)

    def reserve(self, version: str, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Something is about to be put into WORK: its room is taken."""
        self._pool(version).pending.reserve(priority, cost, placement)

    def place(self, version: str, priority: Priority, cost: int, worker: str) -> None:
        """What is about to be put there is for this worker alone."""
        self._pool(version).pending.place(priority, cost, worker)

    def release(self, version: str, priority: Priority, cost: int, placement: str = ANY) -> None:
        """It was not put there, or lies there already."""
        self._pool(version).pending.release(priority, cost, placement)

    def mark_published(
        self, version: str, priority: Priority, seq: int, cost: int, placement: str = ANY
    ) -> None:
        """It lies in WORK as message `seq`, until a worker says that it has pulled so far."""
        unpulled = self._pool(version).pending
        unpulled.mark_published(priority, seq, cost, placement)
        beat = self.last_heartbeat(placement, version)
        if beat and beat.pulled_own >= seq:  # it was faster than the broker's answer
            unpulled.mark_pulled_by(placement, seq)

    def last_heartbeat(self, worker: str, version: str) -> Heartbeat | None:
        """What a worker that is there has told last of a version that it serves."""
        known = self._beats.get((worker, version))
        return known[0] if known else None

    def worker_capacity(
        self, version: str, worker: str, priority: Priority
    ) -> WorkerCapacity | None:
        """How a worker stands that takes work of this version; None for others."""
        beat = self.last_heartbeat(worker, version)
        if beat is None or beat.draining:
            return None
        return self._pools[version].worker_capacity(beat, priority)

    def has_free_sequences(self, version: str, priority: Priority) -> bool:
        """Whether all that was sent to a pool, or is being sent, would run at once."""
        return self._pools[version].free_sequences(priority) >= 0

    def count_workers(self, version: str) -> int:
        """How many take work of this version."""
        return self._pools[version].workers if version in self._pools else 0

    @property
    def pending_sequences(self) -> set[int]:
        """Sequences in WORK that nobody has pulled, as far as is known."""
        return set[int]().union(*(pool.pending.sequences for pool in self._pools.values()))

    def discard(self, sequences: set[int]) -> None:
        """The broker's own account: these are not in WORK any more."""
        for pool in self._pools.values():
            pool.pending.discard(sequences)

    def last_heartbeats(self) -> list[Heartbeat]:
        """The last beats of the workers that are there, of one with several versions each."""
        return [beat for beat, _ in self._beats.values()]

    def __contains__(self, worker: str) -> bool:
        return any(name == worker for name, _ in self._beats)

    def remove_worker(self, worker: str) -> None:
        """Its credit counts no more. Idempotent."""
        for member in [member for member in self._beats if member[0] == worker]:
            self._drop_member(member)

    def _drop_member(self, member: _Member) -> None:
        if known := self._beats.pop(member, None):
            self._pools[member[1]].adjust(-1, known[0])

    def find_late_workers(self, now: float) -> list[str]:
        """Workers that hold something, of which they would have told by now."""
        late = [b for b, at in self._beats.values() if now - at >= LATE_HEARTBEAT_SECONDS]
        return sorted({beat.worker for beat in late if beat.running or beat.waiting})

    def remove_stale_workers(self, now: float) -> list[str]:
        """Drop and name the workers that have fallen silent; their credit counts no more."""
        silent = [
            each for each, (_, at) in self._beats.items() if now - at >= STALE_HEARTBEAT_SECONDS
        ]
        for member in silent:
            self._drop_member(member)
        return sorted({worker for worker, _ in silent})

    def has_room_for(self, version: str, priority: Priority, cost: int) -> bool:
        """True if the pool of a version may be sent a request of this cost now."""
        return version in self._pools and self._pools[version].has_room_for(priority, cost)

    def has_worker_with_room(self, version: str, priority: Priority, cost: int) -> bool:
        """True unless a request is large, and no worker alone would surely run it at once.

        What is under way to any worker may yet take the room that it would leave there, or be
        placed on it; to keep it from all of them it has to be more than they would have left.
        """
        if not self.is_large(version, cost):
            return True
        left = [max(0, room - cost) for _, room in self._workers_with_room(version, priority, cost)]
        return bool(left) and sum(left) >= self._pools[version].reserved_for_any(priority)

    def is_large(self, version: str, cost: int) -> bool:
        """Whether a request takes much of what one of several workers has."""
        pool = self._pools[version]
        return pool.workers > 1 and cost * pool.workers > LARGE_REQUEST_FRACTION * pool.total.tokens

    def find_roomiest(self, version: str, priority: Priority, cost: int) -> str:
        """The worker with the most room that would run a request at once; "" if none would."""
        roomy = self._workers_with_room(version, priority, cost)
        return max(roomy, key=lambda each: each[1], default=("", 0))[0]

    def _workers_with_room(
        self, version: str, priority: Priority, cost: int
    ) -> Iterator[tuple[str, int]]:
        """The workers that would run a request at once, and the tokens that each has."""
        for (worker, of), (beat, _) in self._beats.items():
            standing = self.worker_capacity(version, worker, priority) if of == version else None
            if standing and standing.can_accept(min(cost, beat.kv_tokens)):
                yield worker, standing.free_tokens

    def free_capacity(self, priority: Priority) -> FleetCapacity:
        """What would run at once, over all pools."""
        room = FleetCapacity()
        for pool in self._pools.values():
            room.adjust(+1, *pool.free_capacity(priority))
        return room

    def has_reported_room(self, version: str, priority: Priority) -> bool:
        """True if workers of a pool say that they have room, whatever is on its way to them."""
        free = self._pools[version].free[priority] if version in self._pools else FleetCapacity()
        return free.sequences > 0 and free.tokens > 0

    def preempts_batch(self, version: str) -> bool:
        """True if a pool's batch work gives way to what is more urgent."""
        return version in self._pools and self._pools[version].preempts_batch

    def free_fraction_after(self, version: str, priority: Priority, cost: int) -> float:
        """The share of a pool's room that stays free when it is sent this request, 1 at most."""
        return self._pools[version].free_fraction_after(priority, cost)

    @property
    def free_tokens(self) -> int:
        """Tokens that nothing which was sent needs, however urgent; negative where some wait."""
        everything = Priority.BATCH
        return sum(
            pool.free[everything].tokens - pool.pending.reserved.by_priority[everything].tokens
            for pool in self._pools.values()
        )

    @property
    def total_capacity(self) -> FleetCapacity:
        """The room of all workers, in use or not."""
        whole = FleetCapacity()
        for pool in self._pools.values():
            whole.adjust(+1, pool.total.sequences, pool.total.tokens)
        return whole

    def _pool(self, version: str) -> _VersionPool:
        if (pool := self._pools.get(version)) is None:
            pool = self._pools[version] = _VersionPool()
        return pool

"""The fleet of one model as its heartbeats describe it: its workers and what they have free. Pure.

Free capacity is derived, never counted up and down on its own: what the workers report as free,
less what was dispatched and, by their own account, has not been pulled yet. It is told by priority,
since engines may preempt less urgent work for more urgent work.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dispatcher.workers.pending_work import FleetCapacity, PendingWork, empty_by_priority
from streams.messages import Heartbeat
from streams.subjects import ANY, Priority

LATE_HEARTBEAT_SECONDS = 0.35  # a worker that holds something sends a heartbeat every 0.2 s
STALE_HEARTBEAT_SECONDS = 3.0  # three missed heartbeats: what it had free is not trusted any more
# Requests per worker that may wait in WORK, so that a freed slot is filled at once
PREFETCH_PER_WORKER = 2
# Of a worker's KV: a larger request is not sent before one worker has room for all of it
LARGE_REQUEST_FRACTION = 1 / 8
_Member = tuple[str, str]  # a worker and a version that it serves: each has its own heartbeats


class WorkerCapacity(NamedTuple):
    """Free capacity of one worker, less the requests already placed on it.

    `free_sequences` is negative where requests wait for a sequence. `excess_tokens` are the tokens
    by which the worker holds more than its share of what its pool holds.
    """

    free_sequences: int
    free_tokens: int
    excess_tokens: float

    def can_accept(self, cost: int, prefetch: int = 0) -> bool:
        """True if a request would run there, with at most `prefetch` others waiting before it.

        Without `prefetch` it would run at once.
        """
        return self.free_sequences + prefetch > 0 and (prefetch > 0 or cost <= self.free_tokens)


@dataclass(slots=True)
class _VersionPool:
    """Sums over the workers of one version, but those that drain."""

    workers: int = 0
    preempting_workers: int = 0  # those whose engines preempt less urgent work
    preempts_batch: bool = True  # all workers preempt
    total: FleetCapacity = field(default_factory=FleetCapacity)
    free: dict[Priority, FleetCapacity] = field(default_factory=empty_by_priority)
    pending: PendingWork = field(default_factory=PendingWork)

    def adjust(self, sign: int, beat: Heartbeat) -> None:
        """Add what a worker reports to the sums (`sign` +1) or subtract it (-1)."""
        if beat.draining:
            return
        self.workers += sign
        self.preempting_workers += sign * bool(beat.room)
        self.preempts_batch = self.preempting_workers == self.workers
        self.total.adjust(sign, beat.max_sequences, beat.kv_tokens)
        for priority, free in self.free.items():
            free.adjust(sign, *beat.free_capacity(priority))

    def has_room_for(self, priority: Priority, cost: int) -> bool:
        """True if a request may be sent: it would run at once, or be one of those prefetched."""
        free, reserved = self.free[priority], self._reserved(priority)
        prefetch = PREFETCH_PER_WORKER * self.workers
        if reserved.sequences - min(0, free.sequences) < prefetch:
            return True
        sequences = free.sequences - reserved.sequences + prefetch
        return sequences > 0 and cost <= free.tokens - reserved.tokens

    def free_fraction_after(self, priority: Priority, cost: int) -> float:
        """The fraction of the pool that stays free when this request is sent; negative if none."""
        free, reserved = self.free[priority], self._reserved(priority)
        sequences = (free.sequences - reserved.sequences - 1) / max(1, self.total.sequences)
        return min(sequences, (free.tokens - reserved.tokens - cost) / max(1, self.total.tokens))

    def free_capacity(self, priority: Priority) -> tuple[int, int]:
        """Sequences and tokens that would run at once."""
        free, reserved = self.free[priority], self._reserved(priority)
        return max(0, free.sequences - reserved.sequences), max(0, free.tokens - reserved.tokens)

    def free_sequences(self, priority: Priority) -> int:
        """Sequences that would run at once besides what was sent; negative where some wait."""
        return self.free[priority].sequences - self._reserved(priority).sequences

    def _reserved(self, priority: Priority) -> FleetCapacity:
        """Pending work that may not be preempted for this priority."""
        return self.pending.reserved.by_priority[self._effective_priority(priority)]

    def worker_capacity(self, beat: Heartbeat, priority: Priority) -> WorkerCapacity:
        """The free capacity of one of the pool's workers for work of this priority."""
        sequences, tokens = beat.free_capacity(priority)
        placed_here = self.pending.reserved_for_worker(beat.worker)
        reserved, placed = (
            placed_here.by_priority[self._effective_priority(priority)],
            placed_here.by_priority[Priority.BATCH],
        )
        held = beat.kv_tokens - beat.free_tokens + placed.tokens
        share = beat.kv_tokens / max(1, self.total.tokens) * self._held_tokens
        return WorkerCapacity(
            sequences - reserved.sequences, tokens - reserved.tokens, held - share
        )

    def reserved_for_any(self, priority: Priority) -> int:
        """Tokens of pending work for any worker that may not be preempted for this priority."""
        return self.pending.reserved_for_any(self._effective_priority(priority))

    @property
    def _held_tokens(self) -> int:
        """Tokens that the pool's workers hold, or that pending work will take."""
        all_work = Priority.BATCH
        free, reserved = self.free[all_work], self.pending.reserved.by_priority[all_work]
        return self.total.tokens - free.tokens + reserved.tokens

    def _effective_priority(self, priority: Priority) -> Priority:
        """The priority whose view of pending work applies: batch unless all workers preempt.

        Batch, the least urgent, sees all pending work.
        """
        return priority if self.preempts_batch else Priority.BATCH


class Fleet:
    """The workers of one model: heartbeats in, free capacity by priority out.

    Times are seconds of any monotonic clock, given by the caller. A pool is the workers of one
    version; workers that drain are not part of it.
    """

    def __init__(self) -> None:
        self._beats: dict[_Member, tuple[Heartbeat, float]] = {}
        self._pools: dict[str, _VersionPool] = {}

    def apply_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take in a worker's heartbeat; work that it says it has pulled is no longer pending."""
        member = beat.worker, beat.version
        self._drop_member(member)
        self._beats[member] = beat, now
        pool = self._pool(beat.version)
        pool.adjust(+1, beat)
        for priority, pulled in beat.pulled.items():
            pool.pending.mark_pulled(Priority(priority), pulled)
        pool.pending.mark_pulled_by(beat.worker, beat.pulled_own)

    def reserve(self, version: str, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Count a request of this cost as pending: it is about to be published to WORK."""
        self._pool(version).pending.reserve(priority, cost, placement)

    def place(self, version: str, priority: Priority, cost: int, worker: str) -> None:
        """Note that a reserved request will be published for this worker alone."""
        self._pool(version).pending.place(priority, cost, worker)

    def release(self, version: str, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Stop counting a reserved request: it was not published, or was published before."""
        self._pool(version).pending.release(priority, cost, placement)

    def mark_published(
        self, version: str, priority: Priority, seq: int, cost: int, placement: str = ANY
    ) -> None:
        """Note that a reserved request lies in WORK as message `seq`.

        It is pending until a worker reports that it has pulled so far.
        """
        pending = self._pool(version).pending
        pending.mark_published(priority, seq, cost, placement)
        beat = self.last_heartbeat(placement, version)
        if beat and beat.pulled_own >= seq:  # it pulled before the broker's answer came
            pending.mark_pulled_by(placement, seq)

    def last_heartbeat(self, worker: str, version: str) -> Heartbeat | None:
        """The last heartbeat of a worker for a version that it serves; None if it is not there."""
        known = self._beats.get((worker, version))
        return known[0] if known else None

    def worker_capacity(
        self, version: str, worker: str, priority: Priority
    ) -> WorkerCapacity | None:
        """The free capacity of a worker that takes work of this version; None for all others."""
        beat = self.last_heartbeat(worker, version)
        if beat is None or beat.draining:
            return None
        return self._pools[version].worker_capacity(beat, priority)

    def has_free_sequences(self, version: str, priority: Priority) -> bool:
        """True if all that was sent to a pool, or is being sent, would run at once."""
        return self._pools[version].free_sequences(priority) >= 0

    def count_workers(self, version: str) -> int:
        """The number of workers that take work of this version."""
        return self._pools[version].workers if version in self._pools else 0

    @property
    def pending_sequences(self) -> set[int]:
        """Sequences in WORK that no worker has pulled, as far as is known."""
        return set[int]().union(*(pool.pending.sequences for pool in self._pools.values()))

    def discard(self, sequences: set[int]) -> None:
        """Drop these sequences from pending work: the broker does not hold them any more."""
        for pool in self._pools.values():
            pool.pending.discard(sequences)

    def last_heartbeats(self) -> list[Heartbeat]:
        """The last heartbeat of each worker, one for each version that it serves."""
        return [beat for beat, _ in self._beats.values()]

    def __contains__(self, worker: str) -> bool:
        return any(name == worker for name, _ in self._beats)

    def remove_worker(self, worker: str) -> None:
        """Remove a worker; its free capacity counts no more. Idempotent."""
        for member in [member for member in self._beats if member[0] == worker]:
            self._drop_member(member)

    def _drop_member(self, member: _Member) -> None:
        if known := self._beats.pop(member, None):
            self._pools[member[1]].adjust(-1, known[0])

    def find_late_workers(self, now: float) -> list[str]:
        """Names of workers that hold work and whose heartbeat is late."""
        late = [b for b, at in self._beats.values() if now - at >= LATE_HEARTBEAT_SECONDS]
        return sorted({beat.worker for beat in late if beat.running or beat.waiting})

    def remove_stale_workers(self, now: float) -> list[str]:
        """Remove and name the workers without a heartbeat for `STALE_HEARTBEAT_SECONDS`."""
        stale = [
            each for each, (_, at) in self._beats.items() if now - at >= STALE_HEARTBEAT_SECONDS
        ]
        for member in stale:
            self._drop_member(member)
        return sorted({worker for worker, _ in stale})

    def has_room_for(self, version: str, priority: Priority, cost: int) -> bool:
        """True if a version's pool may be sent a request of this cost now."""
        return version in self._pools and self._pools[version].has_room_for(priority, cost)

    def has_worker_with_room(self, version: str, priority: Priority, cost: int) -> bool:
        """True unless a request is large and no single worker would surely run it at once.

        Pending work for any worker may yet take the room that the request would leave there, or be
        placed on that worker. To keep the request from all of them it has to be more than they
        would have left.
        """
        if not self.is_large(version, cost):
            return True
        left = [max(0, room - cost) for _, room in self._workers_with_room(version, priority, cost)]
        return bool(left) and sum(left) >= self._pools[version].reserved_for_any(priority)

    def is_large(self, version: str, cost: int) -> bool:
        """True if a request takes an eighth or more of what one of several workers has."""
        pool = self._pools[version]
        return pool.workers > 1 and cost * pool.workers > LARGE_REQUEST_FRACTION * pool.total.tokens

    def find_roomiest(self, version: str, priority: Priority, cost: int) -> str:
        """The worker with the most free tokens that would run a request at once; "" if none."""
        roomy = self._workers_with_room(version, priority, cost)
        return max(roomy, key=lambda each: each[1], default=("", 0))[0]

    def _workers_with_room(
        self, version: str, priority: Priority, cost: int
    ) -> Iterator[tuple[str, int]]:
        """Yield the workers that would run a request at once, and the free tokens of each."""
        for (worker, of), (beat, _) in self._beats.items():
            capacity = self.worker_capacity(version, worker, priority) if of == version else None
            if capacity and capacity.can_accept(min(cost, beat.kv_tokens)):
                yield worker, capacity.free_tokens

    def free_capacity(self, priority: Priority) -> FleetCapacity:
        """Sequences and tokens that would run at once, over all pools."""
        free = FleetCapacity()
        for pool in self._pools.values():
            free.adjust(+1, *pool.free_capacity(priority))
        return free

    def has_reported_room(self, version: str, priority: Priority) -> bool:
        """True if a pool's workers report free capacity, whatever is pending for them."""
        free = self._pools[version].free[priority] if version in self._pools else FleetCapacity()
        return free.sequences > 0 and free.tokens > 0

    def preempts_batch(self, version: str) -> bool:
        """True if all of a pool's engines preempt batch work for more urgent work."""
        return version in self._pools and self._pools[version].preempts_batch

    @property
    def always_preempts_batch(self) -> bool:
        """True if the engines of all versions preempt batch work for more urgent work."""
        return all(pool.preempts_batch for pool in self._pools.values())

    def free_fraction_after(self, version: str, priority: Priority, cost: int) -> float:
        """The fraction of a pool's capacity that stays free after this request, 1 at most."""
        return self._pools[version].free_fraction_after(priority, cost)

    @property
    def free_tokens(self) -> int:
        """Tokens that no pending work needs, of whatever priority; negative where some waits."""
        all_work = Priority.BATCH
        return sum(
            pool.free[all_work].tokens - pool.pending.reserved.by_priority[all_work].tokens
            for pool in self._pools.values()
        )

    @property
    def total_capacity(self) -> FleetCapacity:
        """The capacity of all workers that do not drain, in use or not."""
        total = FleetCapacity()
        for pool in self._pools.values():
            total.adjust(+1, pool.total.sequences, pool.total.tokens)
        return total

    def _pool(self, version: str) -> _VersionPool:
        if (pool := self._pools.get(version)) is None:
            pool = self._pools[version] = _VersionPool()
        return pool

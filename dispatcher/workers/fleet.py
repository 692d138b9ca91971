"""The fleet of one model as its heartbeats describe it: its workers and what they have free. Pure.

Free capacity is derived, never counted up and down on its own: what the workers report as free,
less what was dispatched and, by their own account, has not been pulled yet. It is told by priority,
since engines may preempt less urgent work for more urgent work.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dispatcher.workers.unpulled_work import FleetCapacity, UnpulledWork, empty_by_priority
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
    """The sequences and tokens that one worker has free for requests of one priority.

    The needs of requests that were placed on the worker, and that it has not pulled yet, are
    already subtracted. `free_sequences` is negative where requests wait for a sequence.
    `excess_tokens` are the KV tokens by which the worker holds more than its share of what all
    workers of its version hold.
    """

    free_sequences: int
    free_tokens: int
    excess_tokens: float

    def can_accept(self, cost: int, prefetch: int = 0) -> bool:
        """Return whether the worker may be sent a request that reserves `cost` tokens.

        With a `prefetch` of 0 it must run at once. With more, the request may also wait: True while
        fewer than `prefetch` requests wait for a sequence there, whatever its cost.
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
    pending: UnpulledWork = field(default_factory=UnpulledWork)

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
    """The workers of one model as their heartbeats describe them, and what they can still take.

    The model's leader owns it. A pool is the workers of one version; workers that drain (shut down)
    are not part of it. A request is pending from its reservation until a worker reports that it has
    pulled it, or until it is released or discarded. `cost` is its reserved tokens, and `placement`
    the worker that it is for, or `ANY`. Times are seconds of any one monotonic clock, given by the
    caller.
    """

    def __init__(self) -> None:
        self._beats: dict[_Member, tuple[Heartbeat, float]] = {}
        self._pools: dict[str, _VersionPool] = {}

    def apply_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Replace a worker's last heartbeat for a model version by this one, received at `now`.

        Requests that the worker reports as pulled are no longer pending.
        """
        member = beat.worker, beat.version
        self._drop_member(member)
        self._beats[member] = beat, now
        pool = self._pool(beat.version)
        pool.adjust(+1, beat)
        for priority, pulled in beat.pulled.items():
            pool.pending.mark_pulled(Priority(priority), pulled)
        pool.pending.mark_pulled_by(beat.worker, beat.pulled_own)

    def reserve(self, version: str, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Count a request as pending: about to be published to the stream WORK, or not pulled yet.

        `cost` is its reserved tokens, and `placement` the worker that it is for, or any.
        """
        self._pool(version).pending.reserve(priority, cost, placement)

    def place(self, version: str, priority: Priority, cost: int, worker: str) -> None:
        """Count a request that was reserved for any worker as one for `worker` alone."""
        self._pool(version).pending.place(priority, cost, worker)

    def release(self, version: str, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Stop counting a reserved request that will not be published, or was published earlier.

        One that was published earlier may have been pulled already. `placement` is the worker that
        the request was reserved for or placed on, or `ANY`.
        """
        self._pool(version).pending.release(priority, cost, placement)

    def mark_published(
        self, version: str, priority: Priority, seq: int, cost: int, placement: str = ANY
    ) -> None:
        """Record that a request counted by `reserve` is now stored in the stream WORK as `seq`.

        It is pending until a worker reports that it has pulled everything up to that sequence.
        """
        pending = self._pool(version).pending
        pending.mark_published(priority, seq, cost, placement)
        beat = self.last_heartbeat(placement, version)
        if beat and beat.pulled_own >= seq:  # it pulled before the broker's answer came
            pending.mark_pulled_by(placement, seq)

    def last_heartbeat(self, worker: str, version: str) -> Heartbeat | None:
        """Return the last heartbeat that a worker has sent for a model version.

        None if it has sent none, or was removed since.
        """
        known = self._beats.get((worker, version))
        return known[0] if known else None

    def worker_capacity(
        self, version: str, worker: str, priority: Priority
    ) -> WorkerCapacity | None:
        """Return what a worker has free for requests of this version and priority.

        None if the worker does not serve the version, is shutting down (draining), or is unknown.
        """
        beat = self.last_heartbeat(worker, version)
        if beat is None or beat.draining:
            return None
        return self._pools[version].worker_capacity(beat, priority)

    def has_free_sequences(self, version: str, priority: Priority) -> bool:
        """Return True if no request that was sent to a version's workers waits for a free sequence.

        Pending requests count as sent. Requests that engines would preempt for `priority` are left
        out. Raises KeyError for an unknown version.
        """
        return self._pools[version].free_sequences(priority) >= 0

    def count_workers(self, version: str) -> int:
        """Return how many workers serve a version and do not drain; 0 for an unknown version."""
        return self._pools[version].workers if version in self._pools else 0

    @property
    def pending_sequences(self) -> set[int]:
        """The sequences in WORK of all requests that no worker has pulled, as far as is known."""
        return set[int]().union(*(pool.pending.sequences for pool in self._pools.values()))

    def discard(self, sequences: set[int]) -> None:
        """Stop counting as pending the requests that the stream WORK no longer holds.

        `sequences` are their sequences there; those that are not pending are ignored.
        """
        for pool in self._pools.values():
            pool.pending.discard(sequences)

    def last_heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeat of each worker, one for each version that it serves.

        Workers that are shutting down (draining) are included; removed ones are not.
        """
        return [beat for beat, _ in self._beats.values()]

    def __contains__(self, worker: str) -> bool:
        return any(name == worker for name, _ in self._beats)

    def remove_worker(self, worker: str, version: str | None = None) -> None:
        """Forget a worker and its free capacity, for all versions or for one. Idempotent.

        Requests that were sent to it and not pulled stay pending.
        """
        served = [served for name, served in self._beats if name == worker]
        for each in served if version is None else [version]:
            self._drop_member((worker, each))

    def _drop_member(self, member: _Member) -> None:
        if known := self._beats.pop(member, None):
            self._pools[member[1]].adjust(-1, known[0])

    def find_late_workers(self, now: float) -> list[str]:
        """Return the names of workers that hold requests and whose last heartbeat is late.

        It is late after `LATE_HEARTBEAT_SECONDS` (0.35 s). Sorted; an empty list if there are none.
        """
        late = [b for b, at in self._beats.values() if now - at >= LATE_HEARTBEAT_SECONDS]
        return sorted({beat.worker for beat in late if beat.running or beat.waiting})

    def remove_stale_workers(self, now: float) -> list[str]:
        """Remove the workers whose heartbeats have stopped, and return their names.

        They have stopped after `STALE_HEARTBEAT_SECONDS` (3 s) without one. A worker that serves
        several versions is removed only for those without a heartbeat. Sorted; an empty list if
        there are none.
        """
        stale = [
            each for each, (_, at) in self._beats.items() if now - at >= STALE_HEARTBEAT_SECONDS
        ]
        for member in stale:
            self._drop_member(member)
        return sorted({worker for worker, _ in stale})

    def has_room_for(self, version: str, priority: Priority, cost: int) -> bool:
        """Return True if a version's workers may be sent a request of this cost now.

        It would run at once, or be one of the few (two per worker) that may wait in WORK so that a
        freed sequence is filled at once. False for a version without workers.
        """
        return version in self._pools and self._pools[version].has_room_for(priority, cost)

    def has_worker_with_room(self, version: str, priority: Priority, cost: int) -> bool:
        """Return True if a request is not large, or if a worker is sure to have room for it now.

        A large request (see `is_large`) is sure of room only if two things hold. A worker could run
        it at once; and after it, all such workers together would still have as many free tokens as
        the pending requests for any worker need, which could otherwise take the room first. Raises
        KeyError for an unknown version.
        """
        if not self.is_large(version, cost):
            return True
        left = [max(0, room - cost) for _, room in self._workers_with_room(version, priority, cost)]
        return bool(left) and sum(left) >= self._pools[version].reserved_for_any(priority)

    def is_large(self, version: str, cost: int) -> bool:
        """Return True if a request reserves over an eighth of the KV tokens of an average worker.

        `cost` is its reserved tokens. Always False where a version has a single worker. Raises
        KeyError for an unknown version.
        """
        pool = self._pools[version]
        return pool.workers > 1 and cost * pool.workers > LARGE_REQUEST_FRACTION * pool.total.tokens

    def find_roomiest(self, version: str, priority: Priority, cost: int) -> str:
        """Return the worker with the most free tokens of those that would run a request at once.

        An empty string if no worker of the version would.
        """
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
        """Return the sequences and tokens, over all versions, that would run at once if sent now.

        Requests on their way to a worker are subtracted, unless they would be preempted for
        `priority`. Never negative.
        """
        free = FleetCapacity()
        for pool in self._pools.values():
            free.adjust(+1, *pool.free_capacity(priority))
        return free

    def has_reported_room(self, version: str, priority: Priority) -> bool:
        """Return True if a version's workers report free sequences and tokens.

        Requests on their way to them are not subtracted. False for an unknown version.
        """
        free = self._pools[version].free[priority] if version in self._pools else FleetCapacity()
        return free.sequences > 0 and free.tokens > 0

    def preempts_batch(self, version: str) -> bool:
        """Return True if all engines of a version preempt batch work for more urgent work.

        False for an unknown version.
        """
        return version in self._pools and self._pools[version].preempts_batch

    @property
    def always_preempts_batch(self) -> bool:
        """True if the engines of all versions preempt batch work for more urgent work."""
        return all(pool.preempts_batch for pool in self._pools.values())

    def free_fraction_after(self, version: str, priority: Priority, cost: int) -> float:
        """Return the fraction of a version's capacity that stays free if this request is sent.

        That is the free fraction of the sequences or of the KV tokens, whichever is smaller.
        Pending requests are subtracted, unless they would be preempted for `priority`. At most 1;
        negative if the request would find too little free. Raises KeyError for an unknown version.
        """
        return self._pools[version].free_fraction_after(priority, cost)

    @property
    def free_tokens(self) -> int:
        """KV tokens that neither running requests nor those on their way to a worker need.

        Requests of every priority count, and all workers that do not drain. Negative where some
        wait.
        """
        all_work = Priority.BATCH
        return sum(
            pool.free[all_work].tokens - pool.pending.reserved.by_priority[all_work].tokens
            for pool in self._pools.values()
        )

    @property
    def total_capacity(self) -> FleetCapacity:
        """Sequences and KV tokens of all workers, in use or free.

        Workers that are shutting down (draining) do not count.
        """
        total = FleetCapacity()
        for pool in self._pools.values():
            total.adjust(+1, pool.total.sequences, pool.total.tokens)
        return total

    def _pool(self, version: str) -> _VersionPool:
        if (pool := self._pools.get(version)) is None:
            pool = self._pools[version] = _VersionPool()
        return pool

"""Work in a pool's WORK lanes that no worker has pulled yet, for any worker or for one. Pure."""

import heapq
from dataclasses import dataclass, field

from streams.subjects import ANY, Priority

_LEAST_URGENT_FIRST = tuple(reversed(Priority))


@dataclass(slots=True)
class FleetCapacity:
    """A number of sequences and of KV tokens, either free ones or all that there are.

    Where free ones are negative, requests wait for that many.
    """

    sequences: int = 0
    tokens: int = 0

    def adjust(self, sign: int, sequences: int, tokens: int) -> None:
        """Add sequences and tokens (`sign` +1) or subtract them (-1), in place."""
        self.sequences += sign * sequences
        self.tokens += sign * tokens


def empty_by_priority() -> dict[Priority, FleetCapacity]:
    """Return a new capacity of zero for each priority."""
    return {priority: FleetCapacity() for priority in Priority}


@dataclass(slots=True)
class ReservedCapacity:
    """The sequences and tokens that pending requests need, by priority.

    A request is pending when it was dispatched, or is about to be, and no worker has pulled it. The
    entry of a priority counts only the requests that workers would not preempt for that priority:
    those of the same priority and of more urgent ones. `Priority.BATCH`, the least urgent, counts
    all.
    """

    by_priority: dict[Priority, FleetCapacity] = field(default_factory=empty_by_priority)

    def adjust(self, sign: int, priority: Priority, cost: int) -> None:
        """Add (`sign` +1) or subtract (-1) a request that reserves `cost` tokens.

        Its own priority and all less urgent ones count it.
        """
        for p in _LEAST_URGENT_FIRST:
            self.by_priority[p].adjust(sign, 1, cost)
            if p is priority:
                return


_NOTHING_RESERVED = ReservedCapacity()


@dataclass(slots=True)
class _SharedPending:
    """Pending work of one priority for any worker: a heap of (sequence, cost)."""

    waiting: list[tuple[int, int]] = field(default_factory=list)
    pulled_up_to: int = 0  # the sequence up to which everything has been pulled


@dataclass(slots=True)
class _WorkerPending:
    """Pending work for one worker: priority and cost by sequence in WORK.

    `reserved` also counts work that is about to be published there.
    """

    waiting: dict[int, tuple[Priority, int]] = field(default_factory=dict)
    reserved: ReservedCapacity = field(default_factory=ReservedCapacity)


class UnpulledWork:
    """The pending requests of one model version: those that no worker has pulled yet.

    A request is pending from just before it is published to the stream WORK. It is reserved,
    perhaps placed on one worker, then published, and at last pulled or discarded; or it is
    released, if it is not published after all. `cost` is its reserved tokens. `placement` is the
    one worker that the request is for, or `ANY`.
    """

    def __init__(self) -> None:
        self.reserved = ReservedCapacity()
        self._shared = {priority: _SharedPending() for priority in Priority}
        self._by_worker: dict[str, _WorkerPending] = {}

    def reserve(self, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Count a request as pending, since it is about to be published to the stream WORK."""
        self._adjust(+1, priority, cost, placement)

    def release(self, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Take back `reserve` for a request that is not published after all.

        Also for one that the broker had already, published by an earlier leader: a worker may have
        pulled that. `cost` is its reserved tokens. `placement` is the worker that it was reserved
        for or placed on, or `ANY`.
        """
        self._adjust(-1, priority, cost, placement)

    def place(self, priority: Priority, cost: int, worker: str) -> None:
        """Count a request that was reserved for any worker as one for `worker` alone."""
        self._get_worker(worker).reserved.adjust(+1, priority, cost)

    def mark_published(self, priority: Priority, seq: int, cost: int, placement: str = ANY) -> None:
        """Record that a reserved request is now stored in the stream WORK as message `seq`.

        The request is pending until it is pulled. If it is for any worker, and a heartbeat has
        already reported a pull up to that sequence, the request is no longer pending. Raises
        KeyError if `placement` names a worker for which nothing is reserved.
        """
        if placement != ANY:
            self._by_worker[placement].waiting[seq] = priority, cost
            return
        shared = self._shared[priority]
        heapq.heappush(shared.waiting, (seq, cost))
        # A heartbeat may have told of its pull before the broker's answer came
        self.mark_pulled(priority, shared.pulled_up_to)

    def mark_pulled(self, priority: Priority, seq: int) -> None:
        """Record that workers have pulled everything of a priority up to sequence `seq` in WORK.

        Requests for any worker up to there are no longer pending. Those for one worker alone are
        not affected.
        """
        shared = self._shared[priority]
        shared.pulled_up_to = max(shared.pulled_up_to, seq)
        while shared.waiting and shared.waiting[0][0] <= shared.pulled_up_to:
            self._adjust(-1, priority, heapq.heappop(shared.waiting)[1], ANY)

    def mark_pulled_by(self, worker: str, seq: int) -> None:
        """Record that a worker has pulled all requests up to `seq` that are for this worker alone.

        Those requests are no longer pending. An unknown worker is ignored.
        """
        waiting = self._by_worker[worker].waiting if worker in self._by_worker else {}
        for entry in [each for each in waiting if each <= seq]:
            self._drop_for_worker(worker, entry)

    def discard(self, sequences: set[int]) -> None:
        """Stop counting the requests with these sequences, which WORK does not hold any more.

        Sequences that are not pending are ignored.
        """
        for priority, shared in self._shared.items():
            gone = [entry for entry in shared.waiting if entry[0] in sequences]
            for entry in gone:
                shared.waiting.remove(entry)
                self._adjust(-1, priority, entry[1], ANY)
            heapq.heapify(shared.waiting)
        for worker, own in list(self._by_worker.items()):
            for seq in sequences & own.waiting.keys():
                self._drop_for_worker(worker, seq)

    def reserved_for_worker(self, worker: str) -> ReservedCapacity:
        """Return the capacity needed by requests for this worker alone that it has not pulled yet.

        The caller must not change it.
        """
        own = self._by_worker.get(worker)
        return own.reserved if own else _NOTHING_RESERVED

    def reserved_for_any(self, priority: Priority) -> int:
        """Return the tokens needed by requests for any worker that none has pulled yet.

        Only requests that may not be preempted for this priority count.
        """
        placed = sum(own.reserved.by_priority[priority].tokens for own in self._by_worker.values())
        return self.reserved.by_priority[priority].tokens - placed

    @property
    def sequences(self) -> set[int]:
        """The sequences in WORK of all published requests that no worker has pulled; a new set."""
        for_anybody = {seq for shared in self._shared.values() for seq, _ in shared.waiting}
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

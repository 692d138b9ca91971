"""The fleet of one model as its beats tell: who is there, and how much it may be sent. Pure.

Credit is derived, never counted up and down on its own: what the workers say is free, less what was
dispatched and, by their own account, has not been pulled yet. It is told by priority, since engines
take the place of less urgent work for more urgent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dispatcher.unpulled import Credit, Unpulled, by_priority
from streams.messages import Beat
from streams.subjects import ANY, Priority

LATE_SECONDS = 0.35  # a worker that holds something beats every 0.2 s
STALE_SECONDS = 3.0  # three missed beats: its credit is not trusted any more
PREFETCH = 2  # requests per worker that may wait in WORK, so that a freed slot is filled at once
LARGE = 1 / 8  # of a worker's KV: a request from there on is not sent before one has room for it
_Member = tuple[str, str]  # a worker, and one of the versions that it serves, each with its room


class Standing(NamedTuple):
    """What a worker has room for at once, with what was placed on it counted as there.

    `places` are negative where requests wait for one; `ahead` are the tokens by which it holds
    more than its part of what the pool holds.
    """

    places: int
    tokens: int
    ahead: float

    def may_take(self, cost: int, prefetch: int = 0) -> bool:
        """Whether a request would run there, behind at most so many others that wait."""
        return self.places + prefetch > 0 and (prefetch > 0 or cost <= self.tokens)


@dataclass(slots=True)
class _Pool:
    """The sums over one version's workers, but those that drain."""

    workers: int = 0
    yielding: int = 0  # of the workers, those whose batch work gives way
    yields: bool = True  # all do
    whole: Credit = field(default_factory=Credit)
    free: dict[Priority, Credit] = field(default_factory=by_priority)
    unpulled: Unpulled = field(default_factory=Unpulled)

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

    def places(self, priority: Priority) -> int:
        """Sequences that would run at once beside what was sent; negative where some wait."""
        return self.free[priority].sequences - self._taken(priority).sequences

    def _taken(self, priority: Priority) -> Credit:
        """What has been sent and may not give way to this priority."""
        return self.unpulled.taken.of[self._seen_by(priority)]

    def standing(self, beat: Beat, priority: Priority) -> Standing:
        """How one of its workers stands, for work of this priority."""
        sequences, tokens = beat.room_for(priority)
        own = self.unpulled.for_worker(beat.worker)
        taken, placed = own.of[self._seen_by(priority)], own.of[Priority.BATCH]
        held = beat.kv_tokens - beat.free_tokens + placed.tokens
        part = beat.kv_tokens / max(1, self.whole.tokens) * self._held
        return Standing(sequences - taken.sequences, tokens - taken.tokens, held - part)

    def for_any(self, priority: Priority) -> int:
        """Tokens that are under way to any worker, and may not give way to this priority."""
        return self.unpulled.for_any(self._seen_by(priority))

    @property
    def _held(self) -> int:
        """Tokens that its workers hold, or are sent."""
        everything = Priority.BATCH
        free, taken = self.free[everything], self.unpulled.taken.of[everything]
        return self.whole.tokens - free.tokens + taken.tokens

    def _seen_by(self, priority: Priority) -> Priority:
        """Whose view this priority has of what was sent: nothing gives way where not all do."""
        return priority if self.yields else Priority.BATCH


class Fleet:
    """Beats in, credit out. Times are seconds of any monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._beats: dict[_Member, tuple[Beat, float]] = {}
        self._pools: dict[str, _Pool] = {}

    def beat(self, beat: Beat, now: float) -> None:
        """Take in a heartbeat; what it has pulled is no longer waiting."""
        member = beat.worker, beat.version
        self._drop(member)
        self._beats[member] = beat, now
        pool = self._pool(beat.version)
        pool.count(+1, beat)
        for priority, pulled in beat.pulled.items():
            pool.unpulled.pulled(Priority(priority), pulled)
        pool.unpulled.pulled_own(beat.worker, beat.pulled_own)

    def sending(self, version: str, priority: Priority, cost: int, placement: str = ANY) -> None:
        """Something is about to be put into WORK: its room is taken."""
        self._pool(version).unpulled.sending(priority, cost, placement)

    def place(self, version: str, priority: Priority, cost: int, worker: str) -> None:
        """What is about to be put there is for this worker alone."""
        self._pool(version).unpulled.place(priority, cost, worker)

    def not_sent(self, version: str, priority: Priority, cost: int, placement: str = ANY) -> None:
        """It was not put there, or lies there already."""
        self._pool(version).unpulled.not_sent(priority, cost, placement)

    def sent(
        self, version: str, priority: Priority, seq: int, cost: int, placement: str = ANY
    ) -> None:
        """It lies in WORK as message `seq`, until a worker says that it has pulled so far."""
        unpulled = self._pool(version).unpulled
        unpulled.sent(priority, seq, cost, placement)
        beat = self.last_beat(placement, version)
        if beat and beat.pulled_own >= seq:  # it was faster than the broker's answer
            unpulled.pulled_own(placement, seq)

    def last_beat(self, worker: str, version: str) -> Beat | None:
        """What a worker that is there has told last of a version that it serves."""
        known = self._beats.get((worker, version))
        return known[0] if known else None

    def standing(self, version: str, worker: str, priority: Priority) -> Standing | None:
        """How a worker stands that takes work of this version; None for others."""
        beat = self.last_beat(worker, version)
        if beat is None or beat.draining:
            return None
        return self._pools[version].standing(beat, priority)

    def has_places(self, version: str, priority: Priority) -> bool:
        """Whether all that was sent to a pool, or is being sent, would run at once."""
        return self._pools[version].places(priority) >= 0

    def workers_of(self, version: str) -> int:
        """How many take work of this version."""
        return self._pools[version].workers if version in self._pools else 0

    @property
    def unpulled(self) -> set[int]:
        """Sequences in WORK that nobody has pulled, as far as is known."""
        return set[int]().union(*(pool.unpulled.sequences for pool in self._pools.values()))

    def left(self, sequences: set[int]) -> None:
        """The broker's own account: these are not in WORK any more."""
        for pool in self._pools.values():
            pool.unpulled.left(sequences)

    def workers(self) -> list[Beat]:
        """The last beats of the workers that are there, of one with several versions each."""
        return [beat for beat, _ in self._beats.values()]

    def __contains__(self, worker: str) -> bool:
        return any(name == worker for name, _ in self._beats)

    def forget(self, worker: str) -> None:
        """Its credit counts no more. Idempotent."""
        for member in [member for member in self._beats if member[0] == worker]:
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        if known := self._beats.pop(member, None):
            self._pools[member[1]].count(-1, known[0])

    def silent(self, now: float) -> list[str]:
        """Workers that hold something, of which they would have told by now."""
        late = [b for b, at in self._beats.values() if now - at >= LATE_SECONDS]
        return sorted({beat.worker for beat in late if beat.running or beat.waiting})

    def forget_stale(self, now: float) -> list[str]:
        """Drop and name the workers that have fallen silent; their credit counts no more."""
        silent = [each for each, (_, at) in self._beats.items() if now - at >= STALE_SECONDS]
        for member in silent:
            self._drop(member)
        return sorted({worker for worker, _ in silent})

    def fits(self, version: str, priority: Priority, cost: int) -> bool:
        """True if the pool of a version may be sent a request of this cost now."""
        return version in self._pools and self._pools[version].fits(priority, cost)

    def fits_one(self, version: str, priority: Priority, cost: int) -> bool:
        """True unless a request is large, and no worker alone would surely run it at once.

        What is under way to any worker may yet take the room that it would leave there, or be
        placed on it; to keep it from all of them it has to be more than they would have left.
        """
        if not self.is_large(version, cost):
            return True
        left = [max(0, room - cost) for _, room in self._roomy(version, priority, cost)]
        return bool(left) and sum(left) >= self._pools[version].for_any(priority)

    def is_large(self, version: str, cost: int) -> bool:
        """Whether a request takes much of what one of several workers has."""
        pool = self._pools[version]
        return pool.workers > 1 and cost * pool.workers > LARGE * pool.whole.tokens

    def roomiest(self, version: str, priority: Priority, cost: int) -> str:
        """The worker with the most room that would run a request at once; "" if none would."""
        roomy = self._roomy(version, priority, cost)
        return max(roomy, key=lambda each: each[1], default=("", 0))[0]

    def _roomy(self, version: str, priority: Priority, cost: int) -> Iterator[tuple[str, int]]:
        """The workers that would run a request at once, and the tokens that each has."""
        for (worker, of), (beat, _) in self._beats.items():
            standing = self.standing(version, worker, priority) if of == version else None
            if standing and standing.may_take(min(cost, beat.kv_tokens)):
                yield worker, standing.tokens

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
    def free_tokens(self) -> int:
        """Tokens that nothing which was sent needs, however urgent; negative where some wait."""
        everything = Priority.BATCH
        return sum(
            pool.free[everything].tokens - pool.unpulled.taken.of[everything].tokens
            for pool in self._pools.values()
        )

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

"""Where a request goes: to who holds its prefix or adapter, or has most room, or to any. Pure.

Who is next was decided before, and nobody waits for a worker here. One that holds a part of the
prompt is preferred if the request would run there at once, or nowhere, and if what need not be
computed is no less than what the worker holds beyond its part of the pool's load.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from dispatcher.workers.fleet import PREFETCH_PER_WORKER, Fleet, WorkerCapacity
from dispatcher.workers.prefix_index import PrefixIndex
from streams import prefix_hashes
from streams.messages import Heartbeat
from streams.subjects import ANY, Priority

ADAPTER_TOKENS = 4096  # to load an adapter takes about as long as to compute so many tokens
MAX_HOLDERS_TRIED = 8  # holders of one mark: of what many hold, some will do
AVOID_SECONDS = 5.0  # for which nothing is placed on a worker that did not pull what was
_Reusable = tuple[str, int, tuple[str, ...]]  # what, the tokens it saves, who holds it
_PREFIX_LENGTHS = tuple(prefix_hashes.hash_positions(1 << 40))  # of the prefixes that are marked


class PlacementRequest(NamedTuple):
    """A request that is about to be sent: its place among work, and what it could reuse."""

    version: str
    priority: Priority
    cost: int
    prefix_hashes: Sequence[int] = ()  # of its prompt, shortest prefix first
    adapter: str = ""


class Placement(NamedTuple):
    """Where a request goes, and why: `prefix` and `adapter` name what its worker holds of it.

    `room`: it is large, and its worker has the most room.
    It goes to any worker where none is known to hold anything of it (`unknown`) or all do
    (`everywhere`), and where who does is `full`, has too much to do (`busy`), or did not pull what
    was placed on it of late (`slow`).
    """

    worker: str = ANY
    why: str = "unknown"


class PrefixRouter:
    """Knows what the workers of a fleet hold; its owner passes on what the fleet hears."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._indexes: dict[
            str, PrefixIndex
        ] = {}  # by version: what one has computed is no other's
        self._avoided_until: dict[str, float] = {}

    def get_index(self, version: str) -> PrefixIndex:
        """Who holds what of a version."""
        return self._indexes.setdefault(version, PrefixIndex())

    def apply_heartbeat(self, beat: Heartbeat) -> None:
        self.get_index(beat.version).apply_heartbeat(beat)

    def remove_worker(self, worker: str) -> None:
        """It has fallen silent; what it holds of a version that it still beats for stays."""
        for version, holders in self._indexes.items():
            if self._fleet.last_heartbeat(worker, version) is None:
                holders.remove_worker(worker)
        self._avoided_until.pop(worker, None)

    def avoid(self, worker: str, now: float) -> None:
        """It did not pull in time what was placed on it."""
        self._avoided_until[worker] = now + AVOID_SECONDS

    def choose_worker(self, wish: PlacementRequest, now: float) -> Placement:
        """Where to send a request whose room in the pool is already taken."""
        placed = self._choose_holder(wish, now)
        if placed.worker != ANY or not self._fleet.is_large(wish.version, wish.cost):
            return placed
        worker = self._fleet.find_roomiest(wish.version, wish.priority, wish.cost)
        return placed if not worker or self._is_avoided(worker, now) else Placement(worker, "room")

    def _choose_holder(self, wish: PlacementRequest, now: float) -> Placement:
        """A worker that holds something of it, if that costs nobody anything."""
        workers, why = self._fleet.count_workers(wish.version), "unknown"
        for what, tokens, holders in self._reusable(wish):
            if len(holders) >= workers:
                return Placement(why="everywhere" if why == "unknown" else why)
            worker, why = self._best_holder(holders, wish, tokens, now)
            if worker:
                self.get_index(wish.version).expect(worker, wish.prefix_hashes)
                return Placement(worker, what)
        return Placement(why=why)

    def _reusable(self, wish: PlacementRequest) -> list[_Reusable]:
        """What is held of it, a longer prefix first; of what the same workers hold the longest."""
        holders = self.get_index(wish.version)
        each = zip(_PREFIX_LENGTHS, holders.workers_with_each(wish.prefix_hashes), strict=False)
        longest = {held: tokens for tokens, held in each if held}
        found: list[_Reusable] = [("prefix", tokens, held) for held, tokens in longest.items()]
        if len(found) > 1:
            found.sort(key=itemgetter(1), reverse=True)
        if wish.adapter and (
            held := holders.workers_with(prefix_hashes.hash_adapter(wish.adapter))
        ):
            found.append(("adapter", ADAPTER_TOKENS, held))
        return found

    def _best_holder(
        self, holders: tuple[str, ...], wish: PlacementRequest, tokens: int, now: float
    ) -> tuple[str, str]:
        """Of those that hold something the one with the least to do, or why it is none of them."""
        best, least, why = "", float(tokens), "busy"
        for worker in holders[-MAX_HOLDERS_TRIED:]:
            standing = self._fleet.worker_capacity(wish.version, worker, wish.priority)
            if standing and standing.excess_tokens <= least:
                if reason := self._rejection_reason(worker, standing, wish, now):
                    why = reason
                else:
                    best, least = worker, standing.excess_tokens
        return best, why

    def _rejection_reason(
        self, worker: str, standing: WorkerCapacity, wish: PlacementRequest, now: float
    ) -> str:
        """Why a request may not be placed on a worker, whatever it holds."""
        if self._is_avoided(worker, now):
            return "slow"
        others_wait = not self._fleet.has_free_sequences(wish.version, wish.priority)
        return (
            ""
            if standing.can_accept(wish.cost, PREFETCH_PER_WORKER if others_wait else 0)
            else "full"
        )

    def _is_avoided(self, worker: str, now: float) -> bool:
        return self._avoided_until.get(worker, now) > now

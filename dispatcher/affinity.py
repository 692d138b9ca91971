"""Where a request goes: to who holds its prefix or adapter, or has most room, or to any. Pure.

Who is next was decided before, and nobody waits for a worker here. One that holds a part of the
prompt is preferred if the request would run there at once, or nowhere, and if what need not be
computed is no less than what the worker holds beyond its part of the pool's load.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from dispatcher.fleet import PREFETCH, Fleet, Standing
from dispatcher.holders import Holders
from streams import marks
from streams.messages import Beat
from streams.subjects import ANY, Priority

ADAPTER_TOKENS = 4096  # to load an adapter takes about as long as to compute so many tokens
MOST_LOOKED_AT = 8  # holders of one mark: of what many hold, some will do
SHUNNED_SECONDS = 5.0  # for which nothing is placed on a worker that did not pull what was
_Reusable = tuple[str, int, tuple[str, ...]]  # what, the tokens it saves, who holds it
_LENGTHS = tuple(marks.positions(1 << 40))  # of the prefixes that are marked


class Wish(NamedTuple):
    """A request that is about to be sent: its place among work, and what it could reuse."""

    version: str
    priority: Priority
    cost: int
    marks: Sequence[int] = ()  # of its prompt, shortest prefix first
    adapter: str = ""


class Placed(NamedTuple):
    """Where a request goes, and why: `prefix` and `adapter` name what its worker holds of it.

    `room`: it is large, and its worker has the most room.
    It goes to any worker where none is known to hold anything of it (`unknown`) or all do
    (`everywhere`), and where who does is `full`, has too much to do (`busy`), or did not pull what
    was placed on it of late (`slow`).
    """

    worker: str = ANY
    why: str = "unknown"


class Affinity:
    """Knows what the workers of a fleet hold; its owner passes on what the fleet hears."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._holders: dict[str, Holders] = {}  # by version: what one has computed is no other's
        self._shunned: dict[str, float] = {}

    def holders(self, version: str) -> Holders:
        """Who holds what of a version."""
        return self._holders.setdefault(version, Holders())

    def hear(self, beat: Beat) -> None:
        self.holders(beat.version).hear(beat)

    def forget(self, worker: str) -> None:
        """It has fallen silent."""
        for holders in self._holders.values():
            holders.forget(worker)
        self._shunned.pop(worker, None)

    def shun(self, worker: str, now: float) -> None:
        """It did not pull in time what was placed on it."""
        self._shunned[worker] = now + SHUNNED_SECONDS

    def choose(self, wish: Wish, now: float) -> Placed:
        """Where to send a request whose room in the pool is already taken."""
        placed = self._holding(wish, now)
        if placed.worker != ANY or not self._fleet.is_large(wish.version, wish.cost):
            return placed
        worker = self._fleet.roomiest(wish.version, wish.priority, wish.cost)
        return placed if not worker or self._is_shunned(worker, now) else Placed(worker, "room")

    def _holding(self, wish: Wish, now: float) -> Placed:
        """A worker that holds something of it, if that costs nobody anything."""
        workers, why = self._fleet.workers_of(wish.version), "unknown"
        for what, tokens, holders in self._reusable(wish):
            if len(holders) >= workers:
                return Placed(why="everywhere" if why == "unknown" else why)
            worker, why = self._best(holders, wish, tokens, now)
            if worker:
                self.holders(wish.version).expect(worker, wish.marks)
                return Placed(worker, what)
        return Placed(why=why)

    def _reusable(self, wish: Wish) -> list[_Reusable]:
        """What is held of it, a longer prefix first; of what the same workers hold the longest."""
        holders = self.holders(wish.version)
        each = zip(_LENGTHS, holders.of_each(wish.marks), strict=False)
        longest = {held: tokens for tokens, held in each if held}
        found: list[_Reusable] = [("prefix", tokens, held) for held, tokens in longest.items()]
        if len(found) > 1:
            found.sort(key=itemgetter(1), reverse=True)
        if wish.adapter and (held := holders.of(marks.of_adapter(wish.adapter))):
            found.append(("adapter", ADAPTER_TOKENS, held))
        return found

    def _best(
        self, holders: tuple[str, ...], wish: Wish, tokens: int, now: float
    ) -> tuple[str, str]:
        """Of those that hold something the one with the least to do, or why it is none of them."""
        best, least, why = "", float(tokens), "busy"
        for worker in holders[-MOST_LOOKED_AT:]:
            standing = self._fleet.standing(wish.version, worker, wish.priority)
            if standing and standing.ahead <= least:
                if reason := self._objection(worker, standing, wish, now):
                    why = reason
                else:
                    best, least = worker, standing.ahead
        return best, why

    def _objection(self, worker: str, standing: Standing, wish: Wish, now: float) -> str:
        """Why a request may not be placed on a worker, whatever it holds."""
        if self._is_shunned(worker, now):
            return "slow"
        others_wait = not self._fleet.has_places(wish.version, wish.priority)
        return "" if standing.may_take(wish.cost, PREFETCH if others_wait else 0) else "full"

    def _is_shunned(self, worker: str, now: float) -> bool:
        return self._shunned.get(worker, now) > now

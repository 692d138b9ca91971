"""Chooses the worker of a request: a holder of its prefix or adapter, the roomiest, or any. Pure.

Which request is next was decided before, and no request waits for a certain worker here. A worker
that holds a part of the prompt is preferred if the request would run there at once, or would run
nowhere at once, and if what need not be computed is no less than what the worker holds beyond its
share of the pool's load.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from dispatcher.workers.fleet import PREFETCH_PER_WORKER, Fleet, WorkerCapacity
from dispatcher.workers.prefix_index import PrefixIndex
from streams import prefix_hashes
from streams.messages import Heartbeat
from streams.subjects import ANY, Priority

ADAPTER_TOKENS = 4096  # loading an adapter takes about as long as computing so many tokens
MAX_HOLDERS_TRIED = 8  # per prefix hash: where many workers hold it, some of them will do
AVOID_SECONDS = 5.0  # nothing is placed for so long on a worker that did not pull in time
_Reusable = tuple[str, int, tuple[str, ...]]  # prefix or adapter, tokens saved, its holders
_PREFIX_LENGTHS = tuple(prefix_hashes.hash_positions(1 << 40))  # that are hashed


class PlacementRequest(NamedTuple):
    """A request that is about to be published: its size and priority, and what it could reuse.

    `cost` is its reserved tokens: the prompt plus the most that it may generate.
    """

    version: str
    priority: Priority
    cost: int
    prefix_hashes: Sequence[int] = ()  # of its prompt, shortest prefix first
    adapter: str = ""


class Placement(NamedTuple):
    """The worker that a request is published for, or `ANY`, and the reason `why`.

    A worker is chosen for `prefix` or `adapter`, which it holds, or for `room`: the request is
    large, and this worker has the most. The request is for any worker if none is known to hold
    anything of it (`unknown`), if all do (`everywhere`), or if those that do are `full`, have too
    much to do (`busy`), or lately did not pull in time what was placed on them (`slow`).
    """

    worker: str = ANY
    why: str = "unknown"


class PrefixRouter:
    """Chooses the worker for a request by the prompt prefixes and adapters that workers hold.

    The owner passes on every heartbeat that the fleet gets, and every worker that the fleet loses.
    Times are seconds of any one monotonic clock, given by the caller.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # By version: KV that one version has computed is of no use to another
        self._indexes: dict[str, PrefixIndex] = {}
        self._avoided_until: dict[str, float] = {}

    def get_index(self, version: str) -> PrefixIndex:
        """Return the index of what the workers of a version hold.

        An unknown version gets a new, empty index.
        """
        return self._indexes.setdefault(version, PrefixIndex())

    def apply_heartbeat(self, beat: Heartbeat) -> None:
        """Update which prefixes and adapters a worker holds of the heartbeat's version."""
        self.get_index(beat.version).apply_heartbeat(beat)

    def remove_worker(self, worker: str) -> None:
        """Forget what a lost worker holds, except for versions of which it still sends heartbeats.

        Call it after the fleet has removed the worker. An unknown worker is ignored.
        """
        for version, index in self._indexes.items():
            if self._fleet.last_heartbeat(worker, version) is None:
                index.remove_worker(worker)
        self._avoided_until.pop(worker, None)

    def avoid(self, worker: str, now: float) -> None:
        """Keep `choose_worker` from choosing this worker until `AVOID_SECONDS` (5 s) after `now`.

        Call it for a worker that did not pull in time what was placed on it.
        """
        self._avoided_until[worker] = now + AVOID_SECONDS

    def choose_worker(self, request: PlacementRequest, now: float) -> Placement:
        """Return the worker to publish a request for, or `ANY`, with the reason.

        A worker that holds a prefix of the prompt, or the adapter, is chosen if it has room and its
        load beyond its share is no more than the tokens saved there. From then on it counts as
        holding the request's prefixes. Otherwise a large request goes to the worker with the most
        free tokens, and any other request to any worker. Reserve the request's room in the fleet
        first.
        """
        placement = self._choose_holder(request, now)
        if placement.worker != ANY or not self._fleet.is_large(request.version, request.cost):
            return placement
        worker = self._fleet.find_roomiest(request.version, request.priority, request.cost)
        return (
            placement if not worker or self._is_avoided(worker, now) else Placement(worker, "room")
        )

    def _choose_holder(self, request: PlacementRequest, now: float) -> Placement:
        """A worker that holds something of the request, if that delays nobody; else any."""
        workers, why = self._fleet.count_workers(request.version), "unknown"
        for what, tokens, holders in self._reusable(request):
            if len(holders) >= workers:
                return Placement(why="everywhere" if why == "unknown" else why)
            worker, why = self._best_holder(holders, request, tokens, now)
            if worker:
                self.get_index(request.version).expect(worker, request.prefix_hashes)
                return Placement(worker, what)
        return Placement(why=why)

    def _reusable(self, request: PlacementRequest) -> list[_Reusable]:
        """List the prefixes and adapter of a request that workers hold: the longest first.

        Of several prefixes that the same workers hold, only the longest is listed. The adapter
        comes last.
        """
        index = self.get_index(request.version)
        each = zip(_PREFIX_LENGTHS, index.workers_with_each(request.prefix_hashes), strict=False)
        longest = {workers: tokens for tokens, workers in each if workers}
        found: list[_Reusable] = [
            ("prefix", tokens, workers) for workers, tokens in longest.items()
        ]
        if len(found) > 1:
            found.sort(key=itemgetter(1), reverse=True)
        if request.adapter and (
            workers := index.workers_with(prefix_hashes.hash_adapter(request.adapter))
        ):
            found.append(("adapter", ADAPTER_TOKENS, workers))
        return found

    def _best_holder(
        self, holders: tuple[str, ...], request: PlacementRequest, tokens: int, now: float
    ) -> tuple[str, str]:
        """The holder with the least excess load, or "" and the reason why none will do."""
        best, least, why = "", float(tokens), "busy"
        for worker in holders[-MAX_HOLDERS_TRIED:]:
            capacity = self._fleet.worker_capacity(request.version, worker, request.priority)
            if capacity and capacity.excess_tokens <= least:
                if reason := self._rejection_reason(worker, capacity, request, now):
                    why = reason
                else:
                    best, least = worker, capacity.excess_tokens
        return best, why

    def _rejection_reason(
        self, worker: str, capacity: WorkerCapacity, request: PlacementRequest, now: float
    ) -> str:
        """The reason why a request may not be placed on a worker, whatever it holds; else ""."""
        if self._is_avoided(worker, now):
            return "slow"
        others_wait = not self._fleet.has_free_sequences(request.version, request.priority)
        return (
            ""
            if capacity.can_accept(request.cost, PREFETCH_PER_WORKER if others_wait else 0)
            else "full"
        )

    def _is_avoided(self, worker: str, now: float) -> bool:
        return self._avoided_until.get(worker, now) > now

"""Machines that do far less than their like. Pure."""

from collections import defaultdict
from statistics import median

from fleet.planner.fleet_state import FleetState, HeardWorker
from fleet.planner.planner_options import PlannerOptions

HEARD_SECONDS = 3.0  # an older word of a worker says nothing about its pace
LEAST_PEERS = 3  # machines of a model and type, below which none can be called slow


class SlowMachines:
    """Compares each machine's tokens a second per running request with the median of its like.

    One is slow once it was below `slow_share` of it for `slow_seconds`, each time that it could be
    compared.
    """

    def __init__(self, options: PlannerOptions) -> None:
        self._options = options
        self._below_since: dict[str, float] = {}

    def find(self, state: FleetState, now: float) -> set[str]:
        """Return the ids of the machines that are slow."""
        for paces in _paces(state, now).values():
            if len(paces) >= LEAST_PEERS:
                self._compare(paces, now)
        self._below_since = {k: v for k, v in self._below_since.items() if k in state.wanted}
        patience = self._options.slow_seconds
        return {name for name, since in self._below_since.items() if now - since >= patience}

    def _compare(self, paces: dict[str, float], now: float) -> None:
        limit = median(paces.values()) * self._options.slow_share
        for name, pace in paces.items():
            if pace < limit:
                self._below_since.setdefault(name, now)
            else:
                self._below_since.pop(name, None)


def is_anybody_heard(state: FleetState, now: float) -> bool:
    """Return True if some worker of the fleet was heard lately."""
    return any(_is_heard(worker, now) for worker in state.workers.values())


def _paces(state: FleetState, now: float) -> dict[tuple[str, str], dict[str, float]]:
    """Pace of each machine that is heard and runs something, by model and type, by id."""
    found = defaultdict[tuple[str, str], dict[str, float]](dict)
    for name, worker in state.workers.items():
        wanted = state.wanted.get(name)
        if wanted and worker.running > 0 and _is_heard(worker, now):
            pace = worker.tokens_per_second / worker.running
            found[wanted.model, wanted.type][name] = pace
    return found


def _is_heard(worker: HeardWorker, now: float) -> bool:
    return now - worker.heard_at < HEARD_SECONDS

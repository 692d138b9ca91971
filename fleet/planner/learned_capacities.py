"""Capacities of machine types, learned from workers that were full. Pure."""

from collections.abc import Mapping

from fleet.planner.fleet_state import FleetState, MachineCapacity

FULL_SHARE = 0.9  # of its sequences, with which a worker counts as full
WEIGHT = 0.05  # of each look at a full worker


class LearnedCapacities:
    """Capacity of each model and type for which nobody has told one.

    It is a mean over full workers: what each generates, over the share of all tokens that is
    generated. Before a worker was full nothing is known.
    """

    def __init__(self) -> None:
        self._rates: dict[tuple[str, str], float] = {}

    def observe(self, state: FleetState) -> None:
        """Learn from the workers that are full now."""
        for name, worker in state.workers.items():
            wanted = state.wanted.get(name)
            if not wanted or worker.running < FULL_SHARE * worker.max_sequences:
                continue
            model = state.models.get(wanted.model)
            if model and model.output_share and worker.tokens_per_second:
                rate = worker.tokens_per_second / model.output_share
                key = wanted.model, wanted.type
                known = self._rates.get(key, rate)
                self._rates[key] = known + WEIGHT * (rate - known)

    def capacities(self, state: FleetState, model: str) -> Mapping[str, MachineCapacity]:
        """Return what is known for a model by type: what was told, and else what was learned."""
        learned = {
            kind: MachineCapacity(self._rates[model, kind], "learned from full workers")
            for kind in state.types
            if (model, kind) in self._rates
        }
        return {**learned, **state.models[model].capacities}

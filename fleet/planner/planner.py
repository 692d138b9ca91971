"""Decides which machines there are to be, for all models, within the budget. Pure."""

from collections.abc import Mapping

from fleet.planner.budget import keep_budget
from fleet.planner.fleet_decision import FleetDecision
from fleet.planner.fleet_state import FleetState
from fleet.planner.learned_capacities import LearnedCapacities
from fleet.planner.machine_phases import MachinePhases, PhasedMachine
from fleet.planner.model_planner import ModelPlanner
from fleet.planner.model_view import ModelChanges, ModelView
from fleet.planner.planner_options import PlannerOptions
from fleet.planner.slow_machines import is_anybody_heard
from fleet.planner.type_offers import TypeStock
from fleet.planner.type_pauses import TypePauses

DEFAULT_OPTIONS = PlannerOptions()


class Planner:
    """Decides, with a memory of demand and of types that fail; of machines it remembers no more.

    What there is comes with each state. A new planner, after the death of a leader, sees the same
    machines, and ends none before it has seen demand for `hold_seconds`.
    """

    def __init__(self, options: PlannerOptions = DEFAULT_OPTIONS) -> None:
        self._options = options
        self._pauses = TypePauses(options)
        self._phases = MachinePhases(options, self._pauses)
        self._learned = LearnedCapacities()
        self._models: dict[str, ModelPlanner] = {}

    def decide(self, state: FleetState, now: float) -> FleetDecision:
        """Return what is to change at `now`, which never goes back; asked about once a second.

        Machines of models that are not in the state are ended. While the state is paused nothing
        changes.
        """
        machines = self._phases.observe(state, now)
        self._learned.observe(state)
        self._models = {name: self._planner_of(name) for name in state.models}
        stock, changes = TypeStock.of(state), dict[str, ModelChanges]()
        is_heard = is_anybody_heard(state, now)
        for name in state.models:
            view = self._view(state, name, machines, is_heard, now)
            changes[name] = self._models[name].plan(view, stock, now)
        if state.is_paused:
            return FleetDecision(
                reasons=dict.fromkeys(state.models, "an operator has paused planning")
            )
        return keep_budget(state, changes, machines)

    def _planner_of(self, name: str) -> ModelPlanner:
        return self._models.get(name) or ModelPlanner(self._options)

    def _view(
        self,
        state: FleetState,
        name: str,
        machines: Mapping[str, list[PhasedMachine]],
        is_heard: bool,
        now: float,
    ) -> ModelView:
        open_types = {
            key: kind for key, kind in state.types.items() if not self._pauses.is_paused(key, now)
        }
        return ModelView(
            name,
            state.models[name],
            machines.get(name, []),
            self._learned.capacities(state, name),
            state.types,
            open_types,
            [each for each in state.overrides if each.model == name and now < each.expires_at],
            is_heard,
        )

"""The next plan, once the planner has decided. Pure."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from fleet.planner.fleet_decision import FleetDecision
from streams.records.fleet.fleet_plan import FleetChange, FleetPlan, WantedMachine

MAX_CHANGES = 200  # that are kept, the last ones


def apply_decision(
    plan: FleetPlan, decision: FleetDecision, new_id: Callable[[], str], now: float
) -> FleetPlan:
    """Return the plan with what was decided, and the changes with their reasons in its history."""
    ended = {each.machine: each for each in decision.ends if each.machine in plan.machines}
    started = {new_id(): each for each in decision.starts}
    changes = [
        FleetChange(now, "end", name, plan.machines[name].type, each.model, each.reason)
        for name, each in ended.items()
    ]
    changes += [
        FleetChange(now, "start", name, each.type, each.model, each.reason)
        for name, each in started.items()
    ]
    kept = {name: each for name, each in plan.machines.items() if name not in ended}
    new = {k: WantedMachine(v.type, v.model, v.reason, inf) for k, v in started.items()}
    return replace(
        plan,
        machines={**kept, **new},
        changes=[*plan.changes, *changes][-MAX_CHANGES:],
        reasons=decision.reasons,
    )

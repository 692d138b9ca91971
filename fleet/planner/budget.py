"""Keeps what machines cost in an hour within the budget. Pure."""

from collections.abc import Mapping, Sequence

from fleet.planner.fleet_decision import FleetDecision, MachineEnd, MachineStart
from fleet.planner.fleet_state import FleetState
from fleet.planner.machine_phases import PhasedMachine
from fleet.planner.model_view import ModelChanges
from streams.records.fleet.machine_types import MachineType


def keep_budget(
    state: FleetState,
    changes: Mapping[str, ModelChanges],
    machines: Mapping[str, Sequence[PhasedMachine]],
) -> FleetDecision:
    """Return all changes, without starts that would cost more than the budget.

    Models without a machine come first. What ends costs money until it is gone, so at the budget
    nothing is started before. If what is wanted costs more than the budget by itself, machines are
    ended until it does not, of the model with most machines first.
    """
    ends = [end for each in changes.values() for end in each.ends]
    gone = [
        MachineEnd(machine.id, name, "the model is not in the registry")
        for name, found in machines.items()
        if name not in state.models
        for machine in found
    ]
    ends += gone
    reasons = {name: each.reason for name, each in changes.items()}
    starts = [
        start
        for each in sorted(changes.values(), key=lambda each: not each.is_woken)
        for start in each.starts
    ]
    if state.budget_per_hour is not None:
        starts = _affordable(state, starts, state.budget_per_hour, reasons)
        ends += _too_dear(state, ends, machines, state.budget_per_hour)
    return FleetDecision(starts, ends, reasons)


def _affordable(
    state: FleetState, starts: Sequence[MachineStart], budget: int, reasons: dict[str, str]
) -> list[MachineStart]:
    there = {name: machine.type for name, machine in state.machines.items() if machine.state.exists}
    ordered = {name: each.type for name, each in state.wanted.items()}
    cost = sum(_price(state.types, kind) for kind in {**ordered, **there}.values())
    found = []
    for start in starts:
        price = _price(state.types, start.type)
        if cost + price > budget:
            reasons[start.model] = f"{start.reason}; but the budget is spent"
            continue
        cost += price
        found.append(start)
    return found


def _too_dear(
    state: FleetState,
    ends: Sequence[MachineEnd],
    machines: Mapping[str, Sequence[PhasedMachine]],
    budget: int,
) -> list[MachineEnd]:
    ended = {end.machine for end in ends}
    kept = {
        name: sorted((m for m in found if m.id not in ended), key=lambda m: m.created_at)
        for name, found in machines.items()
        if name in state.models
    }
    cost = sum(_price(state.types, m.type) for found in kept.values() for m in found)
    found = []
    while cost > budget:
        name = max(kept, key=lambda name: len(kept[name]))
        machine = kept[name].pop()
        cost -= _price(state.types, machine.type)
        found.append(MachineEnd(machine.id, name, f"{machine.type}: the budget is exceeded"))
    return found


def _price(types: Mapping[str, MachineType], name: str) -> int:
    return types[name].price_per_hour if name in types else 0

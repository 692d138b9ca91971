"""Computes the next state of each machine from the plan, the types and the time. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from streams.records.fleet.fleet_plan import FleetPlan, WantedMachine
from streams.records.fleet.machine_list import Machine, MachineList, MachineState
from streams.records.fleet.machine_types import MachineType


def advance(known: MachineList, plan: FleetPlan, now: float) -> MachineList:
    """Return the list as it has to be at `now`; the list itself if nothing changes.

    What is wanted and new is booting, or refused if there is none to be had; what has booted runs.
    A running machine drains once it is not wanted, and is reclaimed once it is old enough. Machines
    that are wanted no longer and do not run are left out.
    """
    wanted = plan.wanted_at(now)
    machines = {
        name: _advance_one(machine, known.types.get(machine.type), name in wanted, now)
        for name, machine in known.machines.items()
        if name in wanted or machine.state is MachineState.RUNNING or machine.state.is_ending
    }
    for name, each in wanted.items():
        if name not in machines or machines[name].state.is_refused:
            machines[name] = _ask(each, machines.get(name), known.types, machines, now)
    return known if machines == known.machines else replace(known, machines=machines)


def next_change(known: MachineList, plan: FleetPlan, now: float) -> float:
    """Return when time alone changes the list next, in epoch seconds; infinite if it does not.

    It is past for what has only to be advanced once more, as a machine that boots in no time.
    """
    times = [each.expires_at for each in plan.machines.values() if now < each.expires_at]
    for machine in known.machines.values():
        kind = known.types.get(machine.type)
        if kind and machine.state is MachineState.BOOTING:
            times.append(machine.created_at + kind.boot_seconds)
        elif kind and machine.state is MachineState.RUNNING and kind.reclaim_after_seconds:
            times.append(machine.created_at + kind.reclaim_after_seconds)
    return min(times, default=float("inf"))


def resume(known: MachineList, types: Mapping[str, MachineType]) -> MachineList:
    """Return the list of a provider that begins anew: none of its workers runs any more.

    Machines that were ending have ended; the others are kept, so that nothing is started twice,
    unless there is no such type any more.
    """
    machines = {name: each for name, each in known.machines.items() if each.type in types}
    found = replace(known, types=dict(types), machines=machines)
    ending = found.in_state(MachineState.DRAINING, MachineState.RECLAIMING)
    for name in ending:
        found = without_worker(found, name, known.machines[name].changed_at)
    return found


def without_worker(known: MachineList, name: str, now: float) -> MachineList:
    """Return the list once the worker of an ending machine has ended: reclaimed, or forgotten."""
    machines = dict(known.machines)
    machine = machines.pop(name)
    if machine.state is MachineState.RECLAIMING:
        machines[name] = replace(machine, state=MachineState.RECLAIMED, changed_at=now)
    return replace(known, machines=machines)


def with_crash(known: MachineList, name: str) -> MachineList:
    """Return the list after the worker of a machine has died."""
    machine = known.machines[name]
    crashed = replace(machine, crashes=machine.crashes + 1)
    return replace(known, machines={**known.machines, name: crashed})


def _advance_one(
    machine: Machine, kind: MachineType | None, is_wanted: bool, now: float
) -> Machine:
    state, age = machine.state, now - machine.created_at
    if state is MachineState.BOOTING and kind and age >= kind.boot_seconds:
        state = MachineState.RUNNING
    elif state is MachineState.RUNNING and not is_wanted:
        state = MachineState.DRAINING
    elif state is MachineState.RUNNING and kind and _is_too_old(kind, age):
        state = MachineState.RECLAIMING
    return machine if state is machine.state else replace(machine, state=state, changed_at=now)


def _is_too_old(kind: MachineType, age: float) -> bool:
    return kind.reclaim_after_seconds is not None and age >= kind.reclaim_after_seconds


def _ask(
    wanted: WantedMachine,
    refused: Machine | None,
    types: Mapping[str, MachineType],
    machines: Mapping[str, Machine],
    now: float,
) -> Machine:
    """Return a machine that is wanted and does not exist: booting, or refused as before or anew."""
    state = _answer(wanted.type, types, machines)
    if refused and refused.state is state:
        return refused
    return Machine(wanted.type, wanted.model, state, now, now)


def _answer(
    name: str, types: Mapping[str, MachineType], machines: Mapping[str, Machine]
) -> MachineState:
    kind = types.get(name)
    if kind is None:
        return MachineState.UNKNOWN_TYPE
    count = sum(each.type == name and each.state.exists for each in machines.values())
    if kind.quota is not None and count >= kind.quota:
        return MachineState.QUOTA_REACHED
    if kind.stock is not None and count >= kind.stock:
        return MachineState.OUT_OF_STOCK
    return MachineState.BOOTING

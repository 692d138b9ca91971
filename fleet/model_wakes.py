"""Wakes of models: those under way with their phases, and how long a whole one takes. Pure."""

from collections.abc import Collection, Iterable, Mapping

from streams.records.fleet.cold_start import ColdStart
from streams.records.fleet.fleet_plan import FleetPlan, WantedMachine
from streams.records.fleet.machine_list import MachineList, MachineState
from streams.records.fleet.waking import PHASES, Waking

LoadSeconds = Mapping[str, Mapping[str, float]]


def find_cold_starts(
    models: Iterable[str], known: MachineList, load_seconds: LoadSeconds
) -> dict[str, ColdStart]:
    """Return how long each of the models takes to its first worker on the quickest type.

    Those that may have no worker are left out.
    """
    found = {
        name: [
            ColdStart(kind.name, kind.boot_seconds, load_seconds.get(name, {}).get(kind.name))
            for kind in known.types.values()
        ]
        for name in models
        if known.policy_of(name).max_workers
    }
    return {name: min(ways, key=lambda way: way.seconds) for name, ways in found.items() if ways}


def find_wakes(
    plan: FleetPlan, known: MachineList, served: Collection[str], now: float
) -> list[Waking]:
    """Return the wakes of models that have wanted machines, and no worker: are not `served`.

    Each is as far as that of its machines that is ready first.
    """
    by_model: dict[str, list[Waking]] = {}
    for name, wanted in plan.wanted_at(now).items():
        if wanted.model not in served:
            by_model.setdefault(wanted.model, []).append(_wake_of(name, wanted, plan, known, now))
    return [min(wakes, key=_nearness) for wakes in by_model.values()]


def _wake_of(
    name: str, wanted: WantedMachine, plan: FleetPlan, known: MachineList, now: float
) -> Waking:
    machine, kind = known.machines.get(name), known.types.get(wanted.type)
    boot = kind.boot_seconds if kind else 0.0
    load = plan.load_seconds.get(wanted.model, {}).get(wanted.type)
    to_worker = boot + (load or 0.0)
    if machine is None:
        return Waking(wanted.model, "ordered", now + to_worker)
    if machine.state is MachineState.BOOTING:
        return Waking(wanted.model, "booting", machine.created_at + to_worker)
    if machine.state is MachineState.RUNNING:
        ready_at = None if load is None else machine.changed_at + load
        return Waking(wanted.model, "loading", ready_at)
    return Waking(wanted.model, "ordered")


def _nearness(waking: Waking) -> tuple[bool, float, int]:
    """Order of wakes: the first to be ready, then the furthest; those that nobody can tell last."""
    return waking.ready_at is None, waking.ready_at or 0.0, -PHASES.index(waking.phase)

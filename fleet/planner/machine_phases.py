"""Phases of wanted machines, by what their providers and workers have said. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, auto

from fleet.planner.fleet_state import FleetState
from fleet.planner.planner_options import PlannerOptions
from fleet.planner.slow_machines import SlowMachines, is_anybody_heard
from fleet.planner.type_pauses import TypePauses
from streams.records.fleet.machine_list import Machine, MachineState


class MachinePhase(StrEnum):
    """A wanted machine's phase: it says what can be expected of it."""

    COMING = auto()  # ordered or booting, in time so far
    JOINED = auto()  # its worker has been heard with its model warm
    SLOW = auto()  # it has joined, and does far less than its like
    OVERDUE = auto()  # its worker should have been heard long ago, as others are
    LOST = auto()  # its worker should have been heard so long ago that it will not be
    REFUSED = auto()  # it was not to be had
    TAKEN_BACK = auto()  # its provider takes it back, or has

    @property
    def counts(self) -> bool:
        """True if it carries its share now, or will in time."""
        return self in (MachinePhase.COMING, MachinePhase.JOINED)


@dataclass(frozen=True)
class PhasedMachine:
    """A wanted machine in its phase; `created_at` is when it was asked for."""

    id: str
    type: str
    model: str
    phase: MachinePhase
    created_at: float


class MachinePhases:
    """Follows the machines: when each has been heard last, and since when it is waited for.

    It keeps nothing else. A new one, after the death of a leader, gives each machine its time to
    join anew. While no worker at all is heard, none that has joined becomes overdue; one that never
    has is lost some time after it was due, whoever is heard.
    """

    def __init__(self, options: PlannerOptions, pauses: TypePauses) -> None:
        self._options, self._pauses = options, pauses
        self._seen_at: dict[str, float] = {}
        self._heard_at: dict[str, float] = {}
        self._is_anybody_heard = False
        self._slow = SlowMachines(options)

    def observe(self, state: FleetState, now: float) -> dict[str, list[PhasedMachine]]:
        """Return the wanted machines by model; types that fail are paused, others tried again."""
        self._seen_at = {name: self._seen_at.get(name, now) for name in state.wanted}
        heard = {name: worker.heard_at for name, worker in state.workers.items()}
        known = self._heard_at | heard
        self._heard_at = {name: at for name, at in known.items() if name in state.wanted}
        self._is_anybody_heard = is_anybody_heard(state, now)
        slow = self._slow.find(state, now)
        found: dict[str, list[PhasedMachine]] = {}
        for machine in self._phased(state, slow, now):
            found.setdefault(machine.model, []).append(machine)
            self._judge_type(machine, now)
        return found

    def _phased(self, state: FleetState, slow: set[str], now: float) -> Iterator[PhasedMachine]:
        for name, wanted in state.wanted.items():
            machine = state.machines.get(name)
            created_at = machine.created_at if machine else self._seen_at[name]
            phase = self._phase(state, name, machine, now)
            if phase is MachinePhase.JOINED and name in slow:
                phase = MachinePhase.SLOW
            yield PhasedMachine(name, wanted.type, wanted.model, phase, created_at)

    def _phase(
        self, state: FleetState, name: str, machine: Machine | None, now: float
    ) -> MachinePhase:
        if machine and machine.state in (MachineState.RECLAIMING, MachineState.RECLAIMED):
            return MachinePhase.TAKEN_BACK
        if (heard_at := self._heard_at.get(name)) is not None:
            is_lost = self._is_anybody_heard and now - heard_at > self._options.lost_seconds
            return MachinePhase.OVERDUE if is_lost else MachinePhase.JOINED
        if machine and machine.state.is_refused:
            patient = now - machine.changed_at < self._options.refused_seconds
            return MachinePhase.COMING if patient else MachinePhase.REFUSED
        due = max(self._seen_at[name], self._due_at(state, name, machine))
        late = now - due - self._options.join_seconds
        if late > self._options.lost_seconds:
            return MachinePhase.LOST
        return MachinePhase.OVERDUE if late > 0 else MachinePhase.COMING

    def _due_at(self, state: FleetState, name: str, machine: Machine | None) -> float:
        wanted = state.wanted[name]
        kind, model = state.types.get(wanted.type), state.models.get(wanted.model)
        boot = kind.boot_seconds if kind else 0.0
        since = machine.created_at if machine else self._seen_at[name]
        load = model.load_seconds.get(wanted.type) if model else None
        return since + boot + (self._options.first_load_seconds if load is None else load)

    def _judge_type(self, machine: PhasedMachine, now: float) -> None:
        if machine.phase in (MachinePhase.OVERDUE, MachinePhase.LOST, MachinePhase.REFUSED):
            self._pauses.note_failure(machine.type, machine.id, now)
        elif machine.phase is MachinePhase.JOINED:
            self._pauses.note_success(machine.type, machine.created_at)

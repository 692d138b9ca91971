"""Ways to scale: the planner, HPA on queue depth, an oracle, and a static fleet."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import ceil

from bench.autoscaling.fleet_simulation import SimulatedFleet, SimulatedMachine
from fleet.planner.fleet_state import (
    FleetState,
    HeardWorker,
    MachineCapacity,
    PlannedModel,
    PriorityDemand,
)
from fleet.planner.planner import DEFAULT_OPTIONS, Planner
from fleet.planner.planner_options import PlannerOptions
from streams.records.fleet.fleet_plan import WantedMachine
from streams.records.fleet.machine_list import Machine, MachineState
from streams.records.fleet.model_policy import ModelPolicy

WINDOW_SECONDS = 10.0  # over which demand is told
MANY = 10_000  # machines; in the simulator nothing bounds them


def scale_to(fleet: SimulatedFleet, model: str, kind: str, count: int) -> None:
    """Start or end machines of a type, the newest first, until a model has so many."""
    there = fleet.wanted(model)
    for _ in range(count - len(there)):
        fleet.start(kind, model)
    for machine in reversed(there[count:]):
        fleet.end(machine.id)


class StaticScaler:
    """Changes nothing."""

    def decide(self, fleet: SimulatedFleet, now: float) -> None:
        """Leave all machines as they are."""


class HpaScaler:
    """Kubernetes' HPA on queue depth, running requests included, as KEDA counts a NATS consumer.

    As many machines as there are requests, over `target`; every 15 s, within 10 % unchanged, at
    most twice as many or four more at a time, and never fewer than what the last 300 s asked for.
    """

    SYNC_SECONDS, TOLERANCE, STABLE_SECONDS = 15, 0.1, 300.0

    def __init__(self, kind: str, target: float, models: Sequence[str]) -> None:
        self._kind, self._target = kind, target
        self._asked = {model: deque[tuple[float, int]]() for model in models}

    def decide(self, fleet: SimulatedFleet, now: float) -> None:
        """Scale each model, every 15 s."""
        if round(now) % self.SYNC_SECONDS:
            return
        for model, asked in self._asked.items():
            there = fleet.wanted(model)
            depth = len(fleet.loads[model].queue) + sum(len(each.held) for each in there)
            ratio = depth / (self._target * max(1, len(there)))
            wish = ceil(depth / self._target)
            if abs(ratio - 1) <= self.TOLERANCE:
                wish = len(there)
            asked.append((now, max(1, wish)))
            while asked[0][0] < now - self.STABLE_SECONDS:
                asked.popleft()
            most = max(2 * len(there), len(there) + 4)
            scale_to(fleet, model, self._kind, min(most, max(count for _, count in asked)))


class OracleScaler:
    """Knows the arrivals of one boot time ahead, and has as many machines as these will need.

    That is what arrives in the busiest `window` seconds of them, over what `share` of a machine's
    capacity carries. A machine that is not needed for one boot time goes.
    """

    def __init__(self, fleet: SimulatedFleet, kind: str, window: float, share: float) -> None:
        self._kind, self._window, self._share = kind, window, share
        self._boot = fleet.kinds[kind][0].boot_seconds
        self._times: dict[str, list[float]] = {}
        self._sums: dict[str, list[float]] = {}
        for model in sorted({each.model for each in fleet.arrivals}):
            found = [each for each in fleet.arrivals if each.model == model]
            self._times[model] = [each.spec.at for each in found]
            self._sums[model] = [0.0, *accumulate(each.work for each in found)]

    def decide(self, fleet: SimulatedFleet, now: float) -> None:
        """Scale each model."""
        for model in self._times:
            busiest = max(
                self._arrived(model, now + ahead - self._window, now + ahead)
                for ahead in range(int(self._boot) + 1)
            )
            carried = fleet.capacities[model, self._kind] * self._share * self._window
            scale_to(fleet, model, self._kind, max(1, ceil(busiest / carried)))

    def _arrived(self, model: str, begins: float, ends: float) -> float:
        times, sums = self._times[model], self._sums[model]
        return sums[bisect_right(times, ends)] - sums[bisect_left(times, begins)]


class PlannerScaler:
    """The planner, told what the fleet service would tell it."""

    def __init__(self, fleet: SimulatedFleet, options: PlannerOptions = DEFAULT_OPTIONS) -> None:
        self._planner = Planner(options)
        self._models = sorted({each.model for each in fleet.arrivals})
        self.reasons: list[tuple[float, str]] = []

    def decide(self, fleet: SimulatedFleet, now: float) -> None:
        """Let the planner decide, and do it."""
        decision = self._planner.decide(_state(fleet, self._models, now), now)
        for end in decision.ends:
            fleet.end(end.machine)
            self.reasons.append((now, end.reason))
        for start in decision.starts:
            fleet.start(start.type, start.model)
            self.reasons.append((now, start.reason))


def _state(fleet: SimulatedFleet, models: Sequence[str], now: float) -> FleetState:
    wanted = [m for m in fleet.machines.values() if not m.is_draining]
    return FleetState(
        {name: kind for name, (kind, _) in fleet.kinds.items()},
        {model: _planned(fleet, model, now) for model in models},
        {m.id: WantedMachine(m.kind.name, m.model, "", 1e12) for m in wanted},
        {m.id: _record(m) for m in fleet.machines.values()},
        {m.id: _heard(m, now) for m in fleet.machines.values() if m.joined_at is not None},
    )


def _planned(fleet: SimulatedFleet, model: str, now: float) -> PlannedModel:
    load = fleet.loads[model]
    demand = PriorityDemand(
        _rate(load.accepted, now),
        _rate(load.refused, now),
        len(load.queue),
        load.queued_work,
    )
    capacities = {
        kind: MachineCapacity(rate, "bench")
        for (name, kind), rate in fleet.capacities.items()
        if name == model
    }
    running = sum(len(machine.held) for machine in fleet.wanted(model))
    policy = ModelPolicy(min_workers=1, max_workers=MANY)
    loads = dict.fromkeys(capacities, 0.0)
    return PlannedModel(policy, {"standard": demand}, capacities, running, load_seconds=loads)


def _rate(told: list[tuple[float, float]], now: float) -> float:
    """Work a second over the window."""
    window = min(WINDOW_SECONDS, max(now, 1.0))
    first = bisect_left(told, (now - window, 0))
    return sum(work for _, work in told[first:]) / window


def _record(machine: SimulatedMachine) -> Machine:
    state = MachineState.RUNNING if machine.joined_at is not None else MachineState.BOOTING
    state = MachineState.DRAINING if machine.is_draining else state
    at = machine.created_at
    return Machine(machine.kind.name, machine.model, state, at, at)


def _heard(machine: SimulatedMachine, now: float) -> HeardWorker:
    return HeardWorker(now, len(machine.held), machine.engine.model.max_sequences, 1.0)

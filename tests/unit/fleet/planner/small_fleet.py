"""A fleet whose machines come as they were ordered, for tests of the planner."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fleet.planner.fleet_decision import FleetDecision
from fleet.planner.fleet_state import (
    FleetState,
    HeardWorker,
    MachineCapacity,
    PlannedModel,
    PriorityDemand,
)
from fleet.planner.planner import Planner
from streams.records.fleet.fleet_plan import WantedMachine
from streams.records.fleet.machine_list import Machine, MachineState
from streams.records.fleet.machine_types import MachineType
from streams.records.fleet.model_policy import ModelPolicy

MODEL = "m"
BOOT = 30.0
SMALL = MachineType("small", boot_seconds=BOOT, price_per_hour=1_000_000)
LARGE = MachineType("large", boot_seconds=BOOT, price_per_hour=3_500_000)
CAPACITIES = {"small": MachineCapacity(100.0, "bench"), "large": MachineCapacity(400.0, "bench")}


def asked(rate: float | None = 0.0, queued: int | None = 0, **facts: float) -> PriorityDemand:
    """What arrives in tokens a second, and how many requests wait."""
    return PriorityDemand(rate, None if rate is None else 0.0, queued, **facts)


def model_of(
    demand: PriorityDemand, capacities: Mapping[str, MachineCapacity] = CAPACITIES, **policy: object
) -> PlannedModel:
    """A model at one priority; `policy` are fields of its scaling policy."""
    running = 0 if demand.is_none_asked_for else 1
    rules = ModelPolicy(**{"max_workers": 100, **policy})  # type: ignore[arg-type]
    loads = dict.fromkeys(("small", "large", "spot"), 0.0)
    return PlannedModel(rules, {"standard": demand}, capacities, running, 0.5, load_seconds=loads)


@dataclass
class SmallFleet:
    """A provider that does what it is told, with a clock; `failing` types never join.

    Types `out_of_stock` are refused. `silent` workers are not heard.
    """

    types: Mapping[str, MachineType] = field(
        default_factory=lambda: {"small": SMALL, "large": LARGE}
    )
    failing: frozenset[str] = frozenset()
    out_of_stock: frozenset[str] = frozenset()
    silent: set[str] = field(default_factory=set)
    pace: dict[str, float] = field(default_factory=dict)
    now: float = 1_000_000.0

    def __post_init__(self) -> None:
        self.planner = Planner()
        self.wanted: dict[str, WantedMachine] = {}
        self.machines: dict[str, Machine] = {}
        self.decisions: list[tuple[float, FleetDecision]] = []
        self._numbers = itertools.count()

    def run(self, seconds: int, models: Mapping[str, PlannedModel], **state: object) -> None:
        """Decide once a second, and do it."""
        for _ in range(seconds):
            self.step(models, **state)

    def step(self, models: Mapping[str, PlannedModel], **state: object) -> FleetDecision:
        """Decide once, do it, and let a second pass."""
        told = FleetState(
            self.types, models, dict(self.wanted), dict(self.machines), self._workers()
        )
        decision = self.planner.decide(replace(told, **state), self.now)  # type: ignore[arg-type]
        self.decisions.append((self.now, decision))
        for end in decision.ends:
            del self.wanted[end.machine]
            del self.machines[end.machine]
        for start in decision.starts:
            name = f"m-{next(self._numbers)}"
            self.wanted[name] = WantedMachine(start.type, start.model, start.reason, 1e12)
            refused = start.type in self.out_of_stock
            state_of = MachineState.OUT_OF_STOCK if refused else MachineState.BOOTING
            self.machines[name] = Machine(start.type, start.model, state_of, self.now, self.now)
        self.now += 1
        return decision

    def counts(self, model: str = MODEL) -> dict[str, int]:
        """Return how many machines of each type are wanted for a model."""
        found = [each.type for each in self.wanted.values() if each.model == model]
        return {kind: found.count(kind) for kind in sorted(set(found))}

    def words(self) -> list[str]:
        """Return the reasons of all starts and ends so far."""
        steps = [each for _, each in self.decisions]
        starts = [start.reason for each in steps for start in each.starts]
        return starts + [end.reason for each in steps for end in each.ends]

    def _workers(self) -> dict[str, HeardWorker]:
        return {
            name: HeardWorker(self.now, 1, 10, self.pace.get(name, 10.0))
            for name, machine in self.machines.items()
            if machine.state is MachineState.BOOTING and self._has_joined(machine)
            if name not in self.silent
        }

    def _has_joined(self, machine: Machine) -> bool:
        is_over = self.now >= machine.created_at + self.types[machine.type].boot_seconds
        return is_over and machine.type not in self.failing

"""Measures the CPU time of a decision over a fleet of 1,000 workers, 100 models and 8 types."""

import time
from statistics import median

from bench import reporting
from bench.reporting import Figure, Run
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
from streams.subjects import Priority

WORKERS, MODELS, TYPES = 1000, 100, 8
DECISIONS = 100
FIGURES = (
    Figure("steady_ms", "CPU ms for a decision while demand is even", "≤ 50"),
    Figure("burst_ms", "CPU ms for one while each model asks for twice as much", "≤ 50"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, and publish; `seconds` has no effect."""
    setting = {"workers": WORKERS, "models": MODELS, "types": TYPES, "decisions": DECISIONS}
    reporting.publish("plan-time", setting, FIGURES, [_measure() for _ in range(runs)])


def _measure() -> Run:
    planner = Planner()
    steady = [_decide(planner, 800.0, float(at)) for at in range(DECISIONS)]
    burst = [_decide(planner, 1600.0, float(DECISIONS + at)) for at in range(DECISIONS)]
    return {"steady_ms": median(steady), "burst_ms": median(burst)}


def _decide(planner: Planner, rate: float, now: float) -> float:
    """Milliseconds of CPU for a decision; machines do not change, so that a burst stays one."""
    state = _state(rate, now)
    began = time.process_time()
    planner.decide(state, now)
    return 1000 * (time.process_time() - began)


def _state(rate: float, now: float) -> FleetState:
    types = {
        f"t{n}": MachineType(f"t{n}", 10**10 * n, 30.0, 10**6 * n, spot=n % 2 == 0)
        for n in range(1, TYPES + 1)
    }
    capacities = {name: MachineCapacity(100.0, "bench") for name in types}
    share = PriorityDemand(rate / len(Priority), 0.0, 0, 0.0)
    demand = dict.fromkeys(map(str, Priority), share)
    policy = ModelPolicy(max_workers=WORKERS, off_spot=(str(Priority.INTERACTIVE),))
    model = PlannedModel(policy, demand, capacities, 1, 0.5, 10**9, dict.fromkeys(types, 5.0))
    models = {f"model-{n}": model for n in range(MODELS)}
    wanted, machines, workers = {}, {}, {}
    for number in range(WORKERS):
        name, kind = f"m-{number}", f"t{number % TYPES + 1}"
        owner = f"model-{number % MODELS}"
        wanted[name] = WantedMachine(kind, owner, "", 1e12)
        machines[name] = Machine(kind, owner, MachineState.RUNNING, 0.0, 0.0)
        workers[name] = HeardWorker(now, 8, 64, 80.0)
    return FleetState(types, models, wanted, machines, workers)

"""Compares the cost of a fleet under the planner's defaults with an oracle's and HPA's.

Baselines have one setting for all traces: the cheapest that kept the goal on other seeds of both.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from random import Random

from bench import reporting
from bench.autoscaling import arrivals
from bench.autoscaling.fleet_simulation import GOAL_SECONDS, ModelArrival, Scaler, SimulatedFleet
from bench.autoscaling.scalers import HpaScaler, OracleScaler, PlannerScaler, StaticScaler
from bench.live.shared_setting import TRACES
from bench.reporting import Figure, Run
from fleet.planner.planner_options import PlannerOptions
from simulation.step_model import StepModel
from streams.records.fleet.machine_types import MachineType

BOOT_SECONDS = 30.0
LEAST_SECONDS = 600.0
CAPACITY_ROWS = 400
STEPS = StepModel()
KIND = "a10g"
KINDS = {KIND: (MachineType(KIND, boot_seconds=BOOT_SECONDS, price_per_hour=1_000_000), STEPS)}
TRACE_FILES = {"conv": "azure2023_conv.csv", "servegen": "servegen_3models_1h_multitenant.csv"}
CODE = "azure2023_code.csv"
ORACLE = 30.0, 1.0  # seconds of its window, share of the capacity
HPA_TARGET = 4.0  # requests, running or waiting, of each machine
PROCESSES = 2
MONEY = 3.6e18  # a machine hour in the units of the simulation: nanoseconds times 10⁻⁶
STATIC_COUNTS = (4, 8, 12, 16, 24)
UTILISATIONS = (0.5, 0.7, 0.95, 1.2)
ON_OFF_RATE = 8.0  # requests a second while it is on
Load = tuple[Mapping[tuple[str, str], float], Sequence[ModelArrival]]
MakeScaler = Callable[[SimulatedFleet], Scaler]
FIGURES = tuple(
    figure
    for name in TRACE_FILES
    for figure in (
        Figure(f"{name}_planner", f"{name}: machine hours of the planner"),
        Figure(f"{name}_oracle", f"{name}: machine hours of the oracle"),
        Figure(f"{name}_hpa", f"{name}: machine hours of HPA"),
        Figure(f"{name}_over_oracle", f"{name}: planner over oracle", "≤ 1.25"),
        Figure(f"{name}_under_hpa", f"{name}: share below HPA", "≥ 0.25"),
        Figure(f"{name}_kept", f"{name}: goals kept by the planner", "≥ 0.99"),
        Figure(f"{name}_oracle_kept", f"{name}: goals kept by the oracle"),
        Figure(f"{name}_hpa_kept", f"{name}: goals kept by HPA"),
    )
)
CODE_FIGURES = tuple(
    figure
    for name in (
        *(f"planner {share:g}" for share in UTILISATIONS),
        *(f"static {count}" for count in STATIC_COUNTS),
    )
    for figure in (
        Figure(f"{name} hours", f"{name}: machine hours"),
        Figure(f"{name} kept", f"{name}: goals kept"),
    )
)
ON_OFF_FIGURES = (
    Figure("turns", "changes of direction in 10 minutes", "≤ 1"),
    Figure("kept", "goals kept", "≥ 0.99"),
    Figure("over_mean", "machine hours over those that the mean needs"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure so many seeds of so many simulated seconds, at least `LEAST_SECONDS`; publish."""
    long = max(seconds, LEAST_SECONDS)
    with ProcessPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(partial(_measure, seconds=long), range(runs)))
    reporting.publish("autoscaling", _setting(long), FIGURES, found)


def measure_code(runs: int, seconds: float) -> None:
    """Measure the frontier of cost and kept goals on azure_code, as `measure` does."""
    long = max(seconds, LEAST_SECONDS)
    with ProcessPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(partial(_measure_code, seconds=long), range(runs)))
    reporting.publish("autoscaling-code", _setting(long), CODE_FIGURES, found)


def measure_on_off(runs: int, seconds: float) -> None:
    """Measure demand that goes on and off at the boot time, as `measure` does."""
    long = max(seconds, LEAST_SECONDS)
    with ProcessPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(partial(_measure_on_off, seconds=long), range(runs)))
    reporting.publish("autoscaling-on-off", _setting(long), ON_OFF_FIGURES, found)


def _setting(seconds: float) -> Mapping[str, object]:
    return {
        "simulated_seconds": seconds,
        "boot_seconds": BOOT_SECONDS,
        "goal_seconds": GOAL_SECONDS,
        "oracle": ORACLE,
        "hpa_target": HPA_TARGET,
        "planner": vars(PlannerOptions()),
    }


def _measure(seed: int, seconds: float) -> Run:
    run: dict[str, float] = {}
    for name, file in TRACE_FILES.items():
        load = _load(file, seconds, seed)
        models = sorted({each.model for each in load[1]})
        planned = _simulate(load, seconds, PlannerScaler)
        oracle = _simulate(load, seconds, lambda fleet: OracleScaler(fleet, KIND, *ORACLE))
        hpa = _simulate(load, seconds, partial(_make_hpa, models=models))
        run |= {
            f"{name}_planner": planned.cost() / MONEY,
            f"{name}_oracle": oracle.cost() / MONEY,
            f"{name}_hpa": hpa.cost() / MONEY,
            f"{name}_over_oracle": planned.cost() / oracle.cost(),
            f"{name}_under_hpa": 1 - planned.cost() / hpa.cost(),
            f"{name}_kept": planned.attainment(),
            f"{name}_oracle_kept": oracle.attainment(),
            f"{name}_hpa_kept": hpa.attainment(),
        }
    return run


def _make_hpa(fleet: SimulatedFleet, models: Sequence[str]) -> Scaler:
    return HpaScaler(KIND, HPA_TARGET, models)


def _measure_code(seed: int, seconds: float) -> Run:
    load = _load(CODE, seconds, seed)
    run: dict[str, float] = {}
    for share in UTILISATIONS:
        options = PlannerOptions(utilisation=share)
        fleet = _simulate(load, seconds, partial(PlannerScaler, options=options))
        run |= _point(f"planner {share:g}", fleet)
    for count in STATIC_COUNTS:
        fleet = SimulatedFleet(KINDS, load[0], load[1])
        fleet.run(StaticScaler(), seconds, {"m": {KIND: count}})
        run |= _point(f"static {count}", fleet)
    return run


def _point(name: str, fleet: SimulatedFleet) -> Run:
    return {f"{name} hours": fleet.cost() / MONEY, f"{name} kept": fleet.attainment()}


def _measure_on_off(seed: int, seconds: float) -> Run:
    asked = arrivals.on_and_off(BOOT_SECONDS, ON_OFF_RATE, seconds, STEPS, Random(seed))
    capacity = {("m", KIND): measure_capacity(asked)}
    fleet = _simulate((capacity, asked), seconds, PlannerScaler)
    mean = sum(each.work for each in asked) / capacity["m", KIND] / 3600
    return {
        "turns": count_turns(fleet) / (seconds / 600),
        "kept": fleet.attainment(),
        "over_mean": fleet.cost() / MONEY / mean,
    }


def count_turns(fleet: SimulatedFleet) -> int:
    """Return how often a fleet has begun to grow after it had shrunk, or the other way."""
    signs = [sign for _, _, sign in fleet.changes]
    return sum(before != after for before, after in pairwise(signs))


def _load(file: str, seconds: float, seed: int) -> Load:
    """Arrivals of a resampled trace, and what a machine carries of each of its models."""
    rows = arrivals.read_trace(TRACES / file, STEPS)
    models = sorted({row.model for row in rows})
    capacities = {
        (model, KIND): measure_capacity([row for row in rows if row.model == model])
        for model in models
    }
    return capacities, arrivals.resample(rows, seconds, Random(seed))


def measure_capacity(rows: Sequence[ModelArrival]) -> float:
    """Return the expected work that a machine does in a second while many requests wait.

    Counted is the time in which nine of ten end, so that the batch is full.
    """
    chosen = rows[:CAPACITY_ROWS]
    waiting = [replace(row, spec=replace(row.spec, at=0.0)) for row in chosen]
    model = waiting[0].model
    fleet = SimulatedFleet(KINDS, {(model, KIND): 1e9}, waiting)
    fleet.run(StaticScaler(), 1e5, {model: {KIND: 1}})
    ends = sorted(each.ended for each in fleet.requests if each.ended is not None)
    last = ends[int(0.9 * len(waiting))]
    pairs = zip(fleet.requests, waiting, strict=True)
    done = (row.work for each, row in pairs if each.ended is not None and each.ended <= last)
    return sum(done) / last


def _simulate(load: Load, seconds: float, make: MakeScaler) -> SimulatedFleet:
    """Run a scaler on a load, beginning with what its first minute asks for."""
    capacities, asked = load
    fleet = SimulatedFleet(KINDS, capacities, asked)
    first = {
        model: {KIND: max(1, ceil(_first_minute(asked, model) / capacity))}
        for (model, _), capacity in capacities.items()
    }
    fleet.run(make(fleet), seconds, first)
    return fleet


def _first_minute(asked: Sequence[ModelArrival], model: str) -> float:
    found = (each.work for each in asked if each.model == model and each.spec.at < 60)
    return sum(found) / 60

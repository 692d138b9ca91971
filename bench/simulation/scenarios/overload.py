"""B3: more is asked for than can be served: what is let in is on time, and nothing is in vain.

On time is: the first token within `GOAL_SECONDS`, the whole within `DEADLINE_SECONDS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from random import Random

from bench.simulation import measures, workloads
from bench.simulation.baselines import EarlyReject, Edf, Fcfs
from bench.simulation.runs import Outcome, SimulationRun, capacity
from bench.simulation.scenario import Figure, Measure, Scenario, Setting, Values
from bench.simulation.systems import Build, Millstream, SimulatedCluster, with_policy
from bench.simulation.workloads import Workload
from simulation.request import RequestSpec, SimulatedRequest

SECONDS = 300.0
DRAIN_SECONDS = 120.0
GOAL_SECONDS, DEADLINE_SECONDS = 10.0, 60.0
WORKERS = 4
LEVELS = (0.9, 1.0, 2.0, 3.0, 5.0, 10.0)  # times the capacity
JUDGED = 5.0
CAPACITY_ROWS = 400
ARENA, CONV, CODE = "vtc_lmsys_27clients.csv", "azure2023_conv.csv", "azure2023_code.csv"
SYSTEMS: dict[str, Build] = {
    "millstream": Millstream,
    "fcfs": with_policy(Fcfs),
    "edf": with_policy(Edf),
    "early reject": with_policy(EarlyReject),
}
CALM, BURST = 0.5, 5.0  # times the capacity
BURST_BEGINS, BURST_ENDS = 120.0, 180.0
NORMAL = 1.5  # times the p99 before the burst
Replay = Callable[[Sequence[RequestSpec], float, float, Random], list[RequestSpec]]


def at_random(
    rows: Sequence[RequestSpec], rate: float, seconds: float, random: Random
) -> list[RequestSpec]:
    """The lengths of a trace, at Poisson times."""
    arrivals = workloads.poisson(RequestSpec(0, "all", 0, 0), rate, seconds, random)
    return list(workloads.resized(arrivals, rows, random))


def as_it_was(
    rows: Sequence[RequestSpec], rate: float, seconds: float, random: Random
) -> list[RequestSpec]:
    """Rows of a trace from a random place on, squeezed or stretched to the rate, bursts kept."""
    count = ceil(rate * seconds)
    start = random.randrange(len(rows))
    lap = rows[-1].at + 1.0
    taken = [rows[(start + number) % len(rows)] for number in range(count)]
    times = [row.at + (start + n) // len(rows) * lap for n, row in enumerate(taken)]
    scale = seconds / max(times[-1] - times[0], 1e-9)
    return [replace(row, at=(at - times[0]) * scale) for row, at in zip(taken, times, strict=True)]


def in_time(arrivals: list[RequestSpec]) -> list[RequestSpec]:
    return [
        replace(asked, deadline_seconds=DEADLINE_SECONDS, goal_seconds=GOAL_SECONDS)
        for asked in arrivals
    ]


def sizes(setting: Setting, name: str) -> list[RequestSpec]:
    """The rows of a trace that fit a worker."""
    rows = workloads.trace(setting.traces / name, workloads.sized)
    fits = setting.worker.kv_tokens
    return [replace(row, tenant="all") for row in rows if row.cost <= fits]


def whole_capacity(setting: Setting, rows: list[RequestSpec]) -> float:
    """Requests per second that the workers can complete."""
    return WORKERS * capacity(setting.worker, tuple(rows[:CAPACITY_ROWS]))


def _levels(name: str, replay: Replay) -> Measure:
    def measure(setting: Setting, seed: int) -> Values:
        rows = sizes(setting, name)
        plant = SimulatedCluster((setting.worker,) * WORKERS)
        whole = whole_capacity(setting, rows)
        outcomes: dict[str, dict[float, Outcome]] = {system: {} for system in SYSTEMS}
        for level in LEVELS:
            asked = in_time(replay(rows, level * whole, SECONDS, Random(seed)))
            for system, build in SYSTEMS.items():
                run = SimulationRun(build, plant, Workload(asked, SECONDS))
                outcomes[system][level] = run.run(DRAIN_SECONDS)
        peak = max(map(goodput, outcomes["fcfs"].values()))
        return {system: _values(runs, peak) for system, runs in outcomes.items()}

    return measure


def _values(runs: dict[float, Outcome], peak: float) -> dict[str, float]:
    judged = runs[JUDGED]
    values = {f"goodput_{level:g}": goodput(run) / peak for level, run in runs.items()}
    return values | {
        "on_time": measures.share(accepted(judged), lambda fate: fate.on_time),
        "told": told(judged),
        "wasted": wasted(judged),
    }


def goodput(outcome: Outcome, seconds: float = SECONDS) -> float:
    """Virtual tokens per second of what was completed on time while requests came in."""
    good = (f for f in outcome.fates if f.on_time and f.ended is not None and f.ended <= seconds)
    return sum(measures.service_of(fate.spec) for fate in good) / seconds


def accepted(outcome: Outcome) -> list[SimulatedRequest]:
    return [fate for fate in outcome.fates if fate.accepted is not None]


def told(outcome: Outcome) -> float:
    """How long those who got nothing had to wait to hear so: p99, ms."""
    waits = sorted(
        (outcome.ended if fate.ended is None else fate.ended) - fate.spec.at
        for fate in outcome.fates
        if fate.first is None
    )
    return 1000 * waits[ceil(0.99 * len(waits)) - 1] if waits else 0.0


def wasted(outcome: Outcome) -> float:
    """The share of the tokens computed that were computed for what was not on time."""
    whole = sum(fate.computed for fate in outcome.fates)
    return sum(fate.computed for fate in outcome.fates if not fate.on_time) / max(1, whole)


def burst(setting: Setting, seed: int) -> Values:
    """Half of the capacity, a minute of five times the capacity, and half again."""
    rows = sizes(setting, ARENA)
    plant = SimulatedCluster((setting.worker,) * WORKERS)
    whole, random = whole_capacity(setting, rows), Random(seed)
    parts = ((0.0, BURST_BEGINS, CALM), (BURST_BEGINS, BURST_ENDS, BURST))
    asked = []
    for begins, ends, level in (*parts, (BURST_ENDS, SECONDS, CALM)):
        arrivals = at_random(rows, level * whole, ends - begins, random)
        asked += [replace(each, at=each.at + begins) for each in in_time(arrivals)]
    run = partial(SimulationRun, plant=plant, load=Workload(asked, SECONDS))
    outcomes = {system: run(build).run(DRAIN_SECONDS) for system, build in SYSTEMS.items()}
    return {system: {"recovered": recovered(outcome)} for system, outcome in outcomes.items()}


def recovered(
    outcome: Outcome,
    begins: float = BURST_BEGINS,
    ends: float = BURST_ENDS,
    seconds: float = SECONDS,
) -> float:
    """Seconds after the burst from which on 99 % of what is asked is served as before it."""
    before = [fate for fate in outcome.fates if fate.spec.at < begins]
    normal = NORMAL * measures.first_token_percentile(before, 0.99)
    after = [fate for fate in outcome.fates if fate.spec.at >= ends]
    for second in range(int(seconds - ends)):
        later = [fate for fate in after if fate.spec.at >= ends + second]
        if measures.share(later, lambda f: f.ttft is None or f.ttft > normal) <= 0.01:
            return second
    return seconds - ends


FIGURES = (
    *(
        Figure(
            f"goodput_{level:g}",
            f"goodput at {level:g} times the capacity, of FCFS's peak",
            0.97 if level == JUDGED else None,
            "higher",
            "unbounded FCFS 0.04; early reject 1.03" if level == JUDGED else "",
            x=level,
        )
        for level in LEVELS
    ),
    Figure("on_time", f"at {JUDGED:g}: accepted and on time", 0.99, "higher"),
    Figure("told", f"at {JUDGED:g}: p99 until who gets nothing is told so, ms", 10),
    Figure("wasted", f"at {JUDGED:g}: tokens computed in vain", 0.02),
)
SCENARIOS = (
    Scenario("b3-poisson", "B3: overload, Poisson", FIGURES, _levels(ARENA, at_random)),
    Scenario("b3-conv", "B3: overload, Azure's conversations", FIGURES, _levels(CONV, as_it_was)),
    Scenario("b3-code", "B3: overload, Azure's code", FIGURES, _levels(CODE, as_it_was)),
    Scenario(
        "b3-burst",
        "B3: a minute of five times the capacity",
        (Figure("recovered", "seconds until p99 to first token is as before", 10),),
        burst,
    ),
)

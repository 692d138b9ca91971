"""B3: more is asked for than can be served; what is admitted should be on time, without waste.

On time means: the first token within `GOAL_SECONDS`, the whole within `DEADLINE_SECONDS`.
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
JUDGED = 5.0  # times the capacity: the level of the goals
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
    """The same requests with the scenario's deadline and goal."""
    return [
        replace(spec, deadline_seconds=DEADLINE_SECONDS, goal_seconds=GOAL_SECONDS)
        for spec in arrivals
    ]


def sizes(setting: Setting, name: str) -> list[RequestSpec]:
    """The rows of a trace that fit a worker, all of one tenant."""
    rows = workloads.trace(setting.traces / name, workloads.sized)
    fits = setting.worker.kv_tokens
    return [replace(row, tenant="all") for row in rows if row.cost <= fits]


def whole_capacity(setting: Setting, rows: list[RequestSpec]) -> float:
    """Requests per second that all workers together complete."""
    return WORKERS * capacity(setting.worker, tuple(rows[:CAPACITY_ROWS]))


def _levels(name: str, replay: Replay) -> Measure:
    def measure(setting: Setting, seed: int) -> Values:
        rows = sizes(setting, name)
        cluster = SimulatedCluster((setting.worker,) * WORKERS)
        whole = whole_capacity(setting, rows)
        outcomes: dict[str, dict[float, Outcome]] = {system: {} for system in SYSTEMS}
        for level in LEVELS:
            specs = in_time(replay(rows, level * whole, SECONDS, Random(seed)))
            for system, build in SYSTEMS.items():
                run = SimulationRun(build, cluster, Workload(specs, SECONDS))
                outcomes[system][level] = run.run(DRAIN_SECONDS)
        peak = max(map(goodput, outcomes["fcfs"].values()))
        return {system: _values(runs, peak) for system, runs in outcomes.items()}

    return measure


def _values(runs: dict[float, Outcome], peak: float) -> dict[str, float]:
    judged = runs[JUDGED]
    values = {f"goodput_{level:g}": goodput(run) / peak for level, run in runs.items()}
    return values | {
        "on_time": measures.share(accepted(judged), lambda request: request.on_time),
        "told": told(judged),
        "wasted": wasted(judged),
    }


def goodput(outcome: Outcome, seconds: float = SECONDS) -> float:
    """Virtual tokens per second of requests completed on time while requests came in."""
    good = (f for f in outcome.requests if f.on_time and f.ended is not None and f.ended <= seconds)
    return sum(measures.service_of(request.spec) for request in good) / seconds


def accepted(outcome: Outcome) -> list[SimulatedRequest]:
    """The requests that were admitted."""
    return [request for request in outcome.requests if request.accepted is not None]


def told(outcome: Outcome) -> float:
    """The p99 time in ms until requests that got no token heard so."""
    waits = sorted(
        (outcome.ended if request.ended is None else request.ended) - request.spec.at
        for request in outcome.requests
        if request.first is None
    )
    return 1000 * waits[ceil(0.99 * len(waits)) - 1] if waits else 0.0


def wasted(outcome: Outcome) -> float:
    """The fraction of computed tokens that were computed for requests not on time."""
    whole = sum(request.computed for request in outcome.requests)
    return sum(request.computed for request in outcome.requests if not request.on_time) / max(
        1, whole
    )


def burst(setting: Setting, seed: int) -> Values:
    """Half of the capacity, a minute of five times the capacity, and half again."""
    rows = sizes(setting, ARENA)
    cluster = SimulatedCluster((setting.worker,) * WORKERS)
    whole, random = whole_capacity(setting, rows), Random(seed)
    parts = ((0.0, BURST_BEGINS, CALM), (BURST_BEGINS, BURST_ENDS, BURST))
    specs = []
    for begins, ends, level in (*parts, (BURST_ENDS, SECONDS, CALM)):
        arrivals = at_random(rows, level * whole, ends - begins, random)
        specs += [replace(each, at=each.at + begins) for each in in_time(arrivals)]
    run = partial(SimulationRun, cluster=cluster, workload=Workload(specs, SECONDS))
    outcomes = {system: run(build).run(DRAIN_SECONDS) for system, build in SYSTEMS.items()}
    return {system: {"recovered": recovered(outcome)} for system, outcome in outcomes.items()}


def recovered(
    outcome: Outcome,
    begins: float = BURST_BEGINS,
    ends: float = BURST_ENDS,
    seconds: float = SECONDS,
) -> float:
    """Seconds after the burst until 99 % of later requests are served as before it."""
    before = [request for request in outcome.requests if request.spec.at < begins]
    normal = NORMAL * measures.first_token_percentile(before, 0.99)
    after = [request for request in outcome.requests if request.spec.at >= ends]
    for second in range(int(seconds - ends)):
        later = [request for request in after if request.spec.at >= ends + second]
        if measures.share(later, lambda f: f.ttft is None or f.ttft > normal) <= 0.01:
            return second
    return seconds - ends


FIGURES = (
    *(
        Figure(
            f"goodput_{level:g}",
            f"goodput at {level:g} times the capacity over FCFS's peak",
            0.97 if level == JUDGED else None,
            "higher",
            "unbounded FCFS 0.04; early reject 1.03" if level == JUDGED else "",
            x=level,
        )
        for level in LEVELS
    ),
    Figure("on_time", f"at {JUDGED:g}: accepted requests on time", 0.99, "higher"),
    Figure("told", f"at {JUDGED:g}: p99 until a request without a token is told so, ms", 10),
    Figure("wasted", f"at {JUDGED:g}: tokens computed for requests not on time", 0.02),
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

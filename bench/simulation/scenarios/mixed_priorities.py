"""B4: batch work fills what interactive work leaves, and does not delay it."""

from dataclasses import replace
from random import Random

from bench.simulation import measures, workloads
from bench.simulation.baselines import Edf, Fcfs
from bench.simulation.runs import Outcome, SimulationRun, capacity
from bench.simulation.scenario import Figure, Scenario, Setting, Values
from bench.simulation.systems import Build, Millstream, SimulatedCluster, with_policy
from bench.simulation.workloads import Workload
from simulation.request import RequestSpec, SimulatedRequest
from streams.subjects import Priority

SECONDS = 600.0
DRAIN_SECONDS = 600.0
INTERACTIVE = RequestSpec(
    0, "talks", 0, 0, priority=Priority.INTERACTIVE, goal_seconds=2.0, deadline_seconds=60.0
)
BATCH = RequestSpec(0, "computes", 0, 0, priority=Priority.BATCH, deadline_seconds=300.0)
ATTAINMENT = 0.9
LEVELS = tuple(number / 20 for number in range(14, 33))  # of the capacity; half is interactive
INTERACTIVE_SHARE = 0.5  # interactive share of the capacity, beside an endless batch
BATCH_REQUESTS = 200  # of that batch, at a time
CAPACITY_ROWS = 400
TRACE = "vtc_lmsys_27clients.csv"
SYSTEMS: dict[str, Build] = {
    "millstream": Millstream,
    "fcfs": with_policy(Fcfs),
    "edf": with_policy(Edf),
}


class Scene:
    """The requests of one seed, of the lengths of Chatbot Arena's, and one worker to serve them."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.cluster = SimulatedCluster((setting.worker,))
        self._rows = workloads.trace(setting.traces / TRACE, workloads.sized)
        self._capacity = capacity(setting.worker, tuple(self._rows[:CAPACITY_ROWS]))
        self._seed = seed

    def mixed(self, level: float) -> Workload:
        """Poisson arrivals of this share of the capacity, half of them interactive."""
        return Workload(
            workloads.merged(self._of(INTERACTIVE, level / 2), self._of(BATCH, level / 2)), SECONDS
        )

    def alone(self) -> Workload:
        """The interactive requests of `filled` by themselves."""
        return Workload(self._of(INTERACTIVE, INTERACTIVE_SHARE), SECONDS)

    def filled(self) -> Workload:
        """Interactive requests beside a batch that never ends."""
        endless = replace(BATCH, deadline_seconds=10 * SECONDS, repeats=True)
        batch = workloads.resized([endless] * BATCH_REQUESTS, self._rows, Random(self._seed))
        interactive = self._of(INTERACTIVE, INTERACTIVE_SHARE)
        return Workload(workloads.merged(batch, interactive), SECONDS, _is_interactive)

    def _of(self, spec: RequestSpec, share: float) -> list[RequestSpec]:
        random = Random(f"{self._seed} {spec.tenant}")
        arrivals = workloads.poisson(spec, share * self._capacity, SECONDS, random)
        return list(workloads.resized(arrivals, self._rows, random))


def attained(setting: Setting, seed: int) -> Values:
    """The highest rate at which 90 % of all requests are on time."""
    scene = Scene(setting, seed)
    rates = {name: _rate(scene, build) for name, build in SYSTEMS.items()}
    return {name: {"rate": rate, "of_fcfs": rate / rates["fcfs"]} for name, rate in rates.items()}


def _rate(scene: Scene, build: Build) -> float:
    """The last level before attainment falls below 90 %; it falls as the rate grows."""
    best = 0.0
    for level in LEVELS:
        outcome = SimulationRun(build, scene.cluster, scene.mixed(level)).run(DRAIN_SECONDS)
        if measures.share(outcome.requests, lambda request: request.on_time) < ATTAINMENT:
            break
        best = level
    return best


def leftover(setting: Setting, seed: int) -> Values:
    """The batch's part of what interactive work leaves, and the latter's share on time."""
    scene = Scene(setting, seed)
    workload = scene.filled()
    outcomes = {
        name: SimulationRun(build, scene.cluster, workload).run(DRAIN_SECONDS)
        for name, build in SYSTEMS.items()
    }
    most = max(outcome.served for outcome in outcomes.values())
    alone = {
        name: _first_token_p99(
            SimulationRun(build, scene.cluster, scene.alone()).run(DRAIN_SECONDS)
        )
        for name, build in SYSTEMS.items()
    }
    return {name: _filled(outcome, most, alone[name]) for name, outcome in outcomes.items()}


def _first_token_p99(outcome: Outcome) -> float:
    interactive = [request for request in outcome.requests if _is_interactive(request.spec)]
    return measures.first_token_percentile(interactive, 0.99)


def _filled(outcome: Outcome, most: float, alone: float) -> dict[str, float]:
    interactive = [request for request in outcome.requests if _is_interactive(request.spec)]
    interactive_service = sum(_served(request) for request in interactive) / SECONDS
    return {
        "on_time": measures.share(interactive, lambda request: request.on_time),
        "leftover": (outcome.served - interactive_service) / (most - interactive_service),
        "p99": _first_token_p99(outcome),
        "over_alone": _first_token_p99(outcome) / alone,
    }


def _is_interactive(spec: RequestSpec) -> bool:
    return spec.priority is Priority.INTERACTIVE


def _served(request: SimulatedRequest) -> int:
    return (
        measures.service_of(request.spec)
        if request.ended is not None and request.ended <= SECONDS
        else 0
    )


SCENARIOS = (
    Scenario(
        "b4-rate",
        "B4: half interactive, half batch: the rate at 90 % on time",
        (
            Figure("rate", "that rate over the capacity", None, "higher"),
            Figure("of_fcfs", "that rate over FCFS's", 1.3, "higher"),
        ),
        attained,
    ),
    Scenario(
        "b4-leftover",
        "B4: interactive at half of the capacity beside an endless batch",
        (
            Figure("on_time", "interactive on time", 0.99, "higher"),
            Figure("p99", "interactive p99 to first token, s"),
            Figure("over_alone", "that p99 over its p99 without the batch", 1.1, "lower"),
            Figure("leftover", "batch's share of the leftover", 0.85, "higher"),
        ),
        leftover,
    ),
)

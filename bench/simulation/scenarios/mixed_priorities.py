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
LEVELS = tuple(number / 20 for number in range(14, 33))  # of the capacity, half of it interactive
TALKING = 0.5  # of the capacity, beside a batch that never ends
AT_ONCE = 200  # requests of that batch
CAPACITY_ROWS = 400
TRACE = "vtc_lmsys_27clients.csv"
SYSTEMS: dict[str, Build] = {
    "millstream": Millstream,
    "fcfs": with_policy(Fcfs),
    "edf": with_policy(Edf),
}


class Scene:
    """One seed's requests, of the lengths of Chatbot Arena's, against one worker."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.plant = SimulatedCluster((setting.worker,))
        self._rows = workloads.trace(setting.traces / TRACE, workloads.sized)
        self._capacity = capacity(setting.worker, tuple(self._rows[:CAPACITY_ROWS]))
        self._seed = seed

    def mixed(self, level: float) -> Workload:
        """Poisson arrivals of this share of the capacity, half of them interactive."""
        return Workload(
            workloads.merged(self._of(INTERACTIVE, level / 2), self._of(BATCH, level / 2)), SECONDS
        )

    def filled(self) -> Workload:
        """Interactive requests beside a batch that never ends."""
        endless = replace(BATCH, deadline_seconds=10 * SECONDS, repeats=True)
        batch = workloads.resized([endless] * AT_ONCE, self._rows, Random(self._seed))
        talks = self._of(INTERACTIVE, TALKING)
        return Workload(workloads.merged(batch, talks), SECONDS, _talks)

    def _of(self, asked: RequestSpec, share: float) -> list[RequestSpec]:
        random = Random(f"{self._seed} {asked.tenant}")
        arrivals = workloads.poisson(asked, share * self._capacity, SECONDS, random)
        return list(workloads.resized(arrivals, self._rows, random))


def attained(setting: Setting, seed: int) -> Values:
    """The highest rate at which 90 % of all requests are on time."""
    scene = Scene(setting, seed)
    rates = {name: _rate(scene, build) for name, build in SYSTEMS.items()}
    return {name: {"rate": rate, "of_fcfs": rate / rates["fcfs"]} for name, rate in rates.items()}


def _rate(scene: Scene, build: Build) -> float:
    """The last level before attainment falls below; attainment falls as the rate grows."""
    best = 0.0
    for level in LEVELS:
        outcome = SimulationRun(build, scene.plant, scene.mixed(level)).run(DRAIN_SECONDS)
        if measures.share(outcome.fates, lambda fate: fate.on_time) < ATTAINMENT:
            break
        best = level
    return best


def leftover(setting: Setting, seed: int) -> Values:
    """What batch gets of what interactive leaves, and whether that is on time meanwhile."""
    scene = Scene(setting, seed)
    load = scene.filled()
    outcomes = {
        name: SimulationRun(build, scene.plant, load).run(DRAIN_SECONDS)
        for name, build in SYSTEMS.items()
    }
    most = max(outcome.served for outcome in outcomes.values())
    return {name: _filled(outcome, most) for name, outcome in outcomes.items()}


def _filled(outcome: Outcome, most: float) -> dict[str, float]:
    talks = [fate for fate in outcome.fates if _talks(fate.spec)]
    spoken = sum(_served(fate) for fate in talks) / SECONDS
    return {
        "on_time": measures.share(talks, lambda fate: fate.on_time),
        "leftover": (outcome.served - spoken) / (most - spoken),
        "p99": measures.first_token_percentile(talks, 0.99),
    }


def _talks(asked: RequestSpec) -> bool:
    return asked.priority is Priority.INTERACTIVE


def _served(fate: SimulatedRequest) -> int:
    return measures.service_of(fate.spec) if fate.ended is not None and fate.ended <= SECONDS else 0


SCENARIOS = (
    Scenario(
        "b4-rate",
        "B4: half interactive, half batch: the rate at 90 % on time",
        (
            Figure("rate", "that rate, of the capacity", None, "higher"),
            Figure("of_fcfs", "of FCFS's", 1.3, "higher"),
        ),
        attained,
    ),
    Scenario(
        "b4-leftover",
        "B4: interactive at half of the capacity beside an endless batch",
        (
            Figure("on_time", "interactive on time", 0.99, "higher"),
            Figure("p99", "interactive p99 to first token, s"),
            Figure("leftover", "batch's share of the leftover", 0.85, "higher"),
        ),
        leftover,
    ),
)

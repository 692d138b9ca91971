"""B1: tenants that ask for more than there is get equal service, or service by their weights."""

from collections.abc import Mapping
from random import Random

from bench.simulation import measures, workloads
from bench.simulation.baselines import Fcfs, Vtc
from bench.simulation.runs import Outcome, SimulationRun
from bench.simulation.scenario import Figure, Scenario, Setting, Values
from bench.simulation.systems import Build, Millstream, SimulatedCluster, with_policy
from bench.simulation.workloads import Workload
from simulation.request import RequestSpec

SECONDS = 600.0
DRAIN_SECONDS = 3600.0
WEIGHTS = {"t1": 1.0, "t2": 2.0, "t3": 3.0, "t4": 4.0}
PATIENT = 7200.0  # a deadline in seconds that none misses: the paper's requests have none


def _systems(weights: Mapping[str, float] | None = None) -> dict[str, Build]:
    return {
        "millstream": Millstream,
        "fcfs": with_policy(Fcfs),
        "vtc": with_policy(lambda: Vtc(weights)),
    }


def _outcomes(
    setting: Setting, workload: Workload, weights: Mapping[str, float]
) -> dict[str, Outcome]:
    cluster = SimulatedCluster((setting.worker,), weights=weights)
    systems = _systems(weights)
    return {
        name: SimulationRun(build, cluster, workload).run(DRAIN_SECONDS)
        for name, build in systems.items()
    }


def backlogged(setting: Setting, seed: int) -> Values:
    """Two tenants, 1.5 and 3 requests a second, 256 + 256 tokens; the second starts by the seed."""
    first, second = (RequestSpec(0, tenant, 256, 256, deadline_seconds=PATIENT) for tenant in "ab")
    random = Random(seed)
    specs = workloads.merged(
        workloads.jittered(workloads.steady(first, 1.5, SECONDS), 1 / 1.5, random),
        workloads.jittered(workloads.steady(second, 3.0, SECONDS), 1 / 3, random),
    )
    outcomes = _outcomes(setting, Workload(specs, SECONDS), {})
    return {
        name: {
            "gap": measures.accumulated_gap(outcome.requests, SECONDS),
            "throughput": _relative(outcome, outcomes["fcfs"]),
        }
        for name, outcome in outcomes.items()
    }


def arena(setting: Setting, seed: int) -> Values:
    """The Chatbot Arena's 27 clients; the seed shifts each client's requests by up to a second."""
    rows = workloads.trace(setting.traces / "vtc_lmsys_27clients.csv", workloads.sized)
    specs = workloads.merged(
        workloads.jittered(workloads.patient(rows, PATIENT), 1.0, Random(seed))
    )
    outcomes = _outcomes(setting, Workload(specs, SECONDS), {})
    values = {}
    for name, outcome in outcomes.items():
        differences = measures.service_differences(outcome.requests, SECONDS)
        values[name] = {
            "average": sum(differences) / len(differences),
            "maximum": max(differences),
            "throughput": _relative(outcome, outcomes["fcfs"]),
        }
    return values


def weighted(setting: Setting, seed: int) -> Values:
    """Four tenants of weights 1 to 4, all backlogged: their service between 60 s and the end."""
    random = Random(seed)
    specs = workloads.merged(
        *(
            workloads.poisson(
                RequestSpec(0, t, 256, 256, deadline_seconds=PATIENT), 1.5, SECONDS, random
            )
            for t in WEIGHTS
        )
    )
    outcomes = _outcomes(setting, Workload(specs, SECONDS), WEIGHTS)
    return {
        name: {
            "error": measures.worst_share_error(
                measures.service_by_tenant(outcome.requests, 60.0, SECONDS), WEIGHTS
            )
        }
        for name, outcome in outcomes.items()
    }


def _relative(outcome: Outcome, base: Outcome) -> float:
    return measures.tokens_per_second(outcome) / measures.tokens_per_second(base)


THROUGHPUT = Figure("throughput", "throughput over FCFS's", 0.99, "higher")
SCENARIOS = (
    Scenario(
        "b1-two",
        "B1: two backlogged tenants, 1.5 and 3 req/s",
        (
            Figure("gap", "accumulated service gap", 9000, known="FCFS 238,000; VTC's logs 9,050"),
            THROUGHPUT,
        ),
        backlogged,
    ),
    Scenario(
        "b1-arena",
        "B1: 27 clients of Chatbot Arena",
        (
            Figure("average", "average service difference", 250, known="FCFS 434; VTC 252"),
            Figure("maximum", "maximum service difference", 370, known="FCFS 760; VTC 368"),
            THROUGHPUT,
        ),
        arena,
    ),
    Scenario(
        "b1-weights",
        "B1: four backlogged tenants of weights 1:2:3:4",
        (Figure("error", "largest error of a share", 0.05),),
        weighted,
    ),
)

"""B2: one loud tenant asks for far more than its share; nine quiet ones should not feel it."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from bench.simulation import measures, workloads
from bench.simulation.baselines import Fcfs, Replicas, Vtc
from bench.simulation.runs import Outcome, SimulationRun, capacity
from bench.simulation.scenario import Figure, Measure, Scenario, Setting, Values
from bench.simulation.systems import Build, Millstream, SimulatedCluster, with_policy
from bench.simulation.workloads import Workload
from simulation.request import RequestSpec, SimulatedRequest

SECONDS = 600.0
DRAIN_SECONDS = 3600.0
QUIET_SHARE = 0.26  # of the capacity, for all quiet tenants together
QUIET = tuple(f"q{number}" for number in range(9))
LOUD = "loud"
LOUD_AFTER = 60.0  # seconds in which the quiet tenants are alone
LONG_PROMPT = 32_768
LONG_KV = 3 * LONG_PROMPT  # KV tokens of the worker that takes such prompts
LOUD_REPEATS = 1000
ARENA = "vtc_lmsys_27clients.csv"
CAPACITY_ROWS = 400
SYSTEMS: dict[str, Build] = {
    "millstream": Millstream,
    "fcfs": with_policy(Fcfs),
    "vtc": with_policy(Vtc),
}
WEIGHTS = {"four": 4.0, "one": 1.0}


class Scene:
    """The requests of one seed, of the lengths of Chatbot Arena's, and one worker to serve them."""

    def __init__(self, setting: Setting, seed: int, kv_tokens: int = 0) -> None:
        worker = setting.worker
        self.cluster = SimulatedCluster(
            (replace(worker, kv_tokens=max(worker.kv_tokens, kv_tokens)),)
        )
        self._rows = workloads.trace(setting.traces / ARENA, workloads.sized)
        self._random = Random(seed)
        self.capacity = capacity(worker, tuple(self._rows[:CAPACITY_ROWS]))

    def make_arrivals(self, tenant: str, share: float) -> list[RequestSpec]:
        """Poisson arrivals of a tenant that would take this share of the capacity."""
        spec = RequestSpec(0, tenant, 0, 0)
        arrivals = workloads.poisson(spec, share * self.capacity, SECONDS, self._random)
        return list(workloads.resized(arrivals, self._rows, self._random))

    def quiet(self) -> list[RequestSpec]:
        """The requests of the nine quiet tenants."""
        return workloads.merged(
            *(self.make_arrivals(tenant, QUIET_SHARE / len(QUIET)) for tenant in QUIET)
        )

    def long(self) -> list[RequestSpec]:
        """Requests of the loud tenant: ten times a fair share of the service, in long prompts."""
        mean = sum(measures.service_of(row) for row in self._rows) / len(self._rows)
        spec = RequestSpec(0, LOUD, LONG_PROMPT, 256)
        rate = self.capacity * mean / measures.service_of(spec)
        return list(workloads.poisson(spec, rate, SECONDS, self._random))

    def connected(self) -> list[RequestSpec]:
        """Requests of the loud tenant's thousand connections, each of which asks again at once."""
        specs = workloads.steady(RequestSpec(0, LOUD, 0, 0, repeats=True), LOUD_REPEATS, 1.0)
        return list(workloads.resized(specs, self._rows, self._random))


def _beside(loud: Callable[[Scene], list[RequestSpec]], kv_tokens: int = 0) -> Measure:
    """Measure the quiet tenants with and without the loud one."""

    def measure(setting: Setting, seed: int) -> Values:
        scene = Scene(setting, seed, kv_tokens)
        quiet = scene.quiet()
        solo = _run(Millstream, scene.cluster, Workload(quiet, SECONDS))
        later = (replace(spec, at=spec.at + LOUD_AFTER) for spec in loud(scene))
        workload = Workload(workloads.merged(quiet, later), SECONDS, _is_quiet)
        outcomes = {name: _run(build, scene.cluster, workload) for name, build in SYSTEMS.items()}
        best = max(outcome.served for outcome in outcomes.values())
        values = {name: _values(outcome, solo, best) for name, outcome in outcomes.items()}
        return {"solo": {"p99": _p99(solo)}} | values

    return measure


def _over(gateways: int) -> Measure:
    """Measure two backlogged tenants of weights 4 and 1, one through a gateway of its own."""

    def measure(setting: Setting, seed: int) -> Values:
        scene, random = Scene(setting, seed), Random(seed)
        others = [
            replace(spec, gateway=random.randrange(1, gateways))
            for spec in scene.make_arrivals("one", 2.0)
        ]
        workload = Workload(
            workloads.merged(scene.make_arrivals("four", 2.0), others), SECONDS, lambda spec: False
        )
        cluster = replace(scene.cluster, gateways=gateways, weights=WEIGHTS)
        systems = {
            "millstream": Millstream,
            "per replica": with_policy(lambda: Replicas(gateways, WEIGHTS)),
        }
        return {name: _shares(_run(build, cluster, workload)) for name, build in systems.items()}

    return measure


def _shares(outcome: Outcome) -> dict[str, float]:
    got = measures.service_by_tenant(outcome.requests, 60.0, SECONDS)
    return {"ratio": got["four"] / got["one"], "error": measures.worst_share_error(got, WEIGHTS)}


def _run(build: Build, cluster: SimulatedCluster, workload: Workload) -> Outcome:
    return SimulationRun(build, cluster, workload).run(DRAIN_SECONDS)


def _values(outcome: Outcome, solo: Outcome, best: float) -> dict[str, float]:
    return {
        "p99": _p99(outcome),
        "over_solo": _p99(outcome) / _p99(solo),
        "refused": sum(request.refused for request in _of_quiet(outcome)),
        "throughput": outcome.served / best,
    }


def _p99(outcome: Outcome) -> float:
    return measures.first_token_percentile(_of_quiet(outcome), 0.99)


def _of_quiet(outcome: Outcome) -> list[SimulatedRequest]:
    return [request for request in outcome.requests if _is_quiet(request.spec)]


def _is_quiet(spec: RequestSpec) -> bool:
    return spec.tenant != LOUD


FIGURES = (
    Figure("p99", "quiet tenants' p99 to first token, s", known="FCFS 185; VTC 9.4; solo 0.46"),
    Figure("over_solo", "that p99 over the one without the loud tenant", 1.5),
    Figure("refused", "refused requests of quiet tenants", 0),
    Figure("throughput", "throughput over the best system's", 0.93, "higher"),
)
SHARES = (
    Figure("ratio", "service of weight 4 over that of weight 1", known="Dynamo 1"),
    Figure("error", "largest error of a share", 0.05),
)


def _louder(factor: float) -> Measure:
    """Measure the loud tenant at `factor` times a fair share, which is a tenth."""
    return _beside(lambda scene: scene.make_arrivals(LOUD, factor / 10))


SCENARIOS = (
    Scenario("b2-10", "B2: one tenant at 10 times its share", FIGURES, _louder(10)),
    Scenario("b2-100", "B2: one tenant at 100 times its share", FIGURES, _louder(100)),
    Scenario(
        "b2-long", "B2: one tenant with prompts of 32k", FIGURES, _beside(Scene.long, LONG_KV)
    ),
    Scenario("b2-1000", "B2: one tenant on 1,000 connections", FIGURES, _beside(Scene.connected)),
    Scenario("b2-gateways-2", "B2: weights 4:1 over two gateways", SHARES, _over(2)),
    Scenario("b2-gateways-4", "B2: weights 4:1 over four gateways", SHARES, _over(4)),
)

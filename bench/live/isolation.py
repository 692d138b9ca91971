"""B2 on a running system: nine calm tenants, and a loud one with all its requests at one gateway.

The nine's are spread over both gateways. First come, first served is the same load with all
requests in one tenant's name. Beside it stands what the simulator says of the same load.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from bench import reporting
from bench.live.cluster import ClusterShape, engine_options, run_cluster
from bench.live.shared_setting import (
    GATEWAYS,
    PROCESSES,
    TRACES,
    WORKER,
    WORKERS,
    describe_setting,
    run_simulated,
)
from bench.live.traffic import SentRequest, Traffic
from bench.reporting import Figure, Run
from bench.simulation import measures, runs, workloads
from bench.simulation.runs import Outcome, capacity
from bench.simulation.scenarios.isolation import (
    ARENA,
    CAPACITY_ROWS,
    LOUD,
    QUIET,
    QUIET_SHARE,
    WEIGHTS,
)
from bench.simulation.systems import Millstream, SimulatedCluster
from bench.simulation.workloads import Workload
from dispatcher.queueing.fair_queue import service_tokens
from millstream.bench.load_statistics import percentile
from simulation.request import RequestSpec, SimulatedRequest

BEFORE = 0.1  # of the time, in which the nine are alone
LEVEL_SECONDS = 30.0  # until shares are looked at: an empty fleet takes what there is, of anybody
DRAIN_SECONDS = 30.0
LOUD_SOCKETS = 64
ONE = "one"  # tenant of all, where requests are served as they come
STAGES = ("admit", "queue", "dispatch", "prefill")

FIGURES = (
    Figure("requests_per_second", "capacity of the workers, requests/s"),
    Figure("samples", "requests of the nine"),
    Figure("solo_p99_ms", "the nine alone: p99 to first token, ms"),
    Figure("p99_ms", "beside the loud one, ms"),
    Figure("over_solo", "that over solo", "≤ 1.5"),
    Figure("simulated_over_solo", "as simulated"),
    Figure("late_p99_ms", "sent later than they were due: p99, ms"),
    *(Figure(f"{stage}_p99_ms", f"{stage} of those that ended, p99, ms") for stage in STAGES),
    Figure("fcfs_p50_ms", "first come, first served: already p50, ms"),
    Figure("refused", "of the nine's refused", "0"),
    Figure("throughput", "throughput over that of first come, first served", "≥ 0.93"),
    *(Figure(f"cores_{name}", f"cores used by {name}") for name in PROCESSES),
)
SHARES = tuple(
    Figure(f"{key}_{count}", f"{count} gateways: {words}", goal)
    for count in (2, 4)
    for key, words, goal in (
        ("ratio", "service of weight 4 over that of weight 1", ""),
        ("error", "largest error of a share", "≤ 0.05"),
        ("simulated_error", "as simulated", ""),
    )
)


def measure(factor: float, seeds: int, seconds: float) -> None:
    """With a tenant so many times as loud as is fair; each seed on fresh systems."""
    found = [asyncio.run(_measure_loud(factor, seed, seconds)) for seed in range(seeds)]
    reporting.publish(f"live-b2-{factor:g}", describe_setting(seconds), FIGURES, found)


def measure_weights(seeds: int, seconds: float) -> None:
    """Two tenants of weights 4 and 1, both backlogged, one of them at a gateway of its own."""
    if seconds <= LEVEL_SECONDS:
        raise SystemExit(f"shares are looked at after {LEVEL_SECONDS:g} s: give more --seconds")
    found = [asyncio.run(_measure_weights(seed, seconds)) for seed in range(seeds)]
    reporting.publish("live-b2-weights", describe_setting(seconds), SHARES, found)


class TenantArrivals:
    """One seed's requests, of the lengths of Chatbot Arena's."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._rows = workloads.trace(TRACES / ARENA, workloads.sized)
        self._random, self._seconds = Random(seed), seconds
        self.capacity = WORKERS * capacity(WORKER, tuple(self._rows[:CAPACITY_ROWS]))

    def make_arrivals(
        self, tenant: str, share: float, gateways: Sequence[int]
    ) -> list[RequestSpec]:
        """Poisson arrivals at these gateways that would take this share of the capacity."""
        asked, random = RequestSpec(0, tenant, 0, 0), self._random
        arrivals = workloads.poisson(asked, share * self.capacity, self._seconds, random)
        sized = workloads.resized(arrivals, self._rows, random)
        return [replace(each, gateway=random.choice(gateways)) for each in sized]

    def quiet_arrivals(self) -> list[RequestSpec]:
        share = QUIET_SHARE / len(QUIET)
        return workloads.merged(
            *(self.make_arrivals(tenant, share, range(GATEWAYS)) for tenant in QUIET)
        )

    def loud_arrivals(self, factor: float) -> list[RequestSpec]:
        """After a while, all at the first gateway."""
        later = self._seconds * BEFORE
        asked = self.make_arrivals(LOUD, factor / 10, [0])
        moved = (replace(each, at=each.at + later) for each in asked)
        return [each for each in moved if each.at < self._seconds]


async def _measure_loud(factor: float, seed: int, seconds: float) -> Run:
    scene = TenantArrivals(seed, seconds)
    quiet = scene.quiet_arrivals()
    alone = Workload(quiet, seconds)
    load = Workload(workloads.merged(quiet, scene.loud_arrivals(factor)), seconds, _is_quiet)
    solo, _ = await _run_live(alone)
    fcfs = await _run_first_come(load)
    outcome, traffic = await _run_live(load)
    calm = _of_quiet(outcome)
    modelled, modelled_solo = (run_simulated(each, DRAIN_SECONDS) for each in (load, alone))
    return {
        "requests_per_second": scene.capacity,
        "samples": len(calm),
        "solo_p99_ms": 1000 * _p99(solo.fates),
        "p99_ms": 1000 * _p99(calm),
        "over_solo": _p99(calm) / _p99(solo.fates),
        "simulated_over_solo": _p99(_of_quiet(modelled)) / _p99(modelled_solo.fates),
        **_stages([sent for sent in traffic.sent if _is_quiet(sent.asked)]),
        "fcfs_p50_ms": 1000 * measures.first_token_percentile(_of_quiet(fcfs), 0.5),
        "refused": sum(fate.refused for fate in calm),
        "throughput": outcome.served / fcfs.served,
        **{f"cores_{name}": traffic.cores[name] for name in PROCESSES},
    }


def _stages(sent: Sequence[SentRequest]) -> Run:
    """Where time was lost: before a request was sent, and in each stage of those that ended."""
    samples = [each.sample for each in sent]
    late = [1000 * (sample.sent - sample.due) for sample in samples]
    spent = {stage: [s.timing[stage] for s in samples if s.is_ok] for stage in STAGES}
    spent["late"] = late
    return {f"{name}_p99_ms": percentile(sorted(values), 0.99) for name, values in spent.items()}


async def _run_first_come(load: Workload) -> Outcome:
    """One tenant's requests are served in the order in which they come."""
    asked = [replace(each, tenant=ONE) for each in load.asked]
    outcome, _ = await _run_live(Workload(asked, load.seconds, lambda asked: False))
    for fate, own in zip(outcome.fates, load.asked, strict=True):
        fate.spec = own
    return outcome


async def _run_live(load: Workload) -> tuple[Outcome, Traffic]:
    tenants = dict.fromkeys((*QUIET, LOUD, ONE), 1.0)
    shape = ClusterShape(tenants, engine_options(WORKER), WORKERS, GATEWAYS)
    async with run_cluster(shape) as plant:
        traffic = Traffic(plant, {LOUD: LOUD_SOCKETS, ONE: LOUD_SOCKETS})
        return await traffic.run(load, DRAIN_SECONDS), traffic


async def _measure_weights(seed: int, seconds: float) -> Run:
    found: dict[str, float] = {}
    for count in (2, 4):
        scene = TenantArrivals(seed, seconds)
        asked = workloads.merged(
            scene.make_arrivals("four", 2.0, [0]), scene.make_arrivals("one", 2.0, range(1, count))
        )
        load = Workload(asked, seconds, lambda asked: False)
        shape = ClusterShape(WEIGHTS, engine_options(WORKER), WORKERS, count)
        async with run_cluster(shape) as plant:
            outcome = await Traffic(plant, dict.fromkeys(WEIGHTS, LOUD_SOCKETS)).run(load, 0.0)
        modelled = SimulatedCluster((WORKER,) * WORKERS, count, WEIGHTS)
        expected = runs.SimulationRun(Millstream, modelled, load).run(0.0)
        got = shares(outcome, seconds)
        found |= {
            f"ratio_{count}": got["four"] / got["one"],
            f"error_{count}": measures.worst_share_error(got, WEIGHTS),
            f"simulated_error_{count}": measures.worst_share_error(
                shares(expected, seconds), WEIGHTS
            ),
        }
    return found


def shares(outcome: Outcome, seconds: float) -> dict[str, float]:
    """The service that each tenant saw once things were level.

    What has not ended counts, too: more of the tenant that gets less is under way.
    """
    generated = {fate.request_id: n for engine in outcome.engines for fate, n in engine.progress()}
    got = dict.fromkeys(WEIGHTS, 0.0)
    for fate in outcome.fates:
        tokens = generated.get(fate.request_id, fate.generated)
        got[fate.spec.tenant] += _service_seen(fate, tokens, seconds)
    return got


def _service_seen(fate: SimulatedRequest, generated: int, seconds: float) -> float:
    """Of one request, spread evenly from its first token to its last."""
    if fate.first is None:
        return 0.0
    until = fate.ended or seconds
    spent = service_tokens(fate.spec.prompt_tokens, generated)
    return spent * max(0.0, until - max(LEVEL_SECONDS, fate.first)) / max(until - fate.first, 1e-6)


def _p99(fates: Sequence[SimulatedRequest]) -> float:
    return measures.first_token_percentile(fates, 0.99)


def _of_quiet(outcome: Outcome) -> list[SimulatedRequest]:
    return [fate for fate in outcome.fates if _is_quiet(fate.spec)]


def _is_quiet(asked: RequestSpec) -> bool:
    return asked.tenant != LOUD

"""B2 on a running system: nine quiet tenants beside a loud one whose requests enter one gateway.

The requests of the nine are spread over both gateways. For "first come, first served" the same load
is sent as requests of one tenant. The simulator's figures for the same load are printed beside.
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

BEFORE = 0.1  # share of the time in which the nine are alone
LEVEL_SECONDS = 30.0  # before shares are measured: a fleet that is empty at first serves anybody
DRAIN_SECONDS = 30.0
LOUD_SOCKETS = 64
ONE = "one"  # the tenant of all requests in the run that is first come, first served
STAGES = ("admit", "queue", "dispatch", "prefill")

FIGURES = (
    Figure("requests_per_second", "capacity of the workers, requests/s"),
    Figure("samples", "requests of the nine"),
    Figure("solo_p99_ms", "the nine alone: p99 to first token, ms"),
    Figure("p99_ms", "the nine beside the loud one: p99 to first token, ms"),
    Figure("over_solo", "p99 beside the loud one over p99 alone", "≤ 1.5"),
    Figure("simulated_over_solo", "the same in the simulator"),
    Figure("late_p99_ms", "delay of sending after the due time, p99, ms"),
    *(Figure(f"{stage}_p99_ms", f"{stage} of those that ended, p99, ms") for stage in STAGES),
    Figure("fcfs_p50_ms", "first come, first served: p50 to first token, ms"),
    Figure("refused", "refused requests of the nine", "0"),
    Figure("throughput", "throughput over that of first come, first served", "≥ 0.93"),
    *(Figure(f"cores_{name}", f"cores used by {name}") for name in PROCESSES),
)
SHARES = tuple(
    Figure(f"{key}_{count}", f"{count} gateways: {words}", goal)
    for count in (2, 4)
    for key, words, goal in (
        ("ratio", "service of weight 4 over that of weight 1", ""),
        ("error", "largest error of a share", "≤ 0.05"),
        ("simulated_error", "the same in the simulator", ""),
    )
)


def measure(factor: float, seeds: int, seconds: float) -> None:
    """Measure and publish with a tenant that sends `factor` times its fair share.

    Each seed is run on fresh systems.
    """
    found = [asyncio.run(_measure_loud(factor, seed, seconds)) for seed in range(seeds)]
    reporting.publish(f"live-b2-{factor:g}", describe_setting(seconds), FIGURES, found)


def measure_weights(seeds: int, seconds: float) -> None:
    """Measure and publish the shares of two backlogged tenants of weights 4 and 1.

    One of them has a gateway of its own. Raises `SystemExit` if `seconds` are too few.
    """
    if seconds <= LEVEL_SECONDS:
        raise SystemExit(f"shares are measured after {LEVEL_SECONDS:g} s: give more --seconds")
    found = [asyncio.run(_measure_weights(seed, seconds)) for seed in range(seeds)]
    reporting.publish("live-b2-weights", describe_setting(seconds), SHARES, found)


class TenantArrivals:
    """The requests of one seed, with the lengths of Chatbot Arena's."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._rows = workloads.trace(TRACES / ARENA, workloads.sized)
        self._random, self._seconds = Random(seed), seconds
        self.capacity = WORKERS * capacity(WORKER, tuple(self._rows[:CAPACITY_ROWS]))

    def make_arrivals(
        self, tenant: str, share: float, gateways: Sequence[int]
    ) -> list[RequestSpec]:
        """Return Poisson arrivals at random ones of `gateways`, for this share of the capacity."""
        spec, random = RequestSpec(0, tenant, 0, 0), self._random
        arrivals = workloads.poisson(spec, share * self.capacity, self._seconds, random)
        sized = workloads.resized(arrivals, self._rows, random)
        return [replace(each, gateway=random.choice(gateways)) for each in sized]

    def quiet_arrivals(self) -> list[RequestSpec]:
        """Return the arrivals of the nine quiet tenants at all gateways, merged by time."""
        share = QUIET_SHARE / len(QUIET)
        return workloads.merged(
            *(self.make_arrivals(tenant, share, range(GATEWAYS)) for tenant in QUIET)
        )

    def loud_arrivals(self, factor: float) -> list[RequestSpec]:
        """Return the loud tenant's arrivals, all at the first gateway after a tenth of the time."""
        later = self._seconds * BEFORE
        arrivals = self.make_arrivals(LOUD, factor / 10, [0])
        moved = (replace(each, at=each.at + later) for each in arrivals)
        return [each for each in moved if each.at < self._seconds]


async def _measure_loud(factor: float, seed: int, seconds: float) -> Run:
    arrivals = TenantArrivals(seed, seconds)
    quiet = arrivals.quiet_arrivals()
    alone = Workload(quiet, seconds)
    load = Workload(workloads.merged(quiet, arrivals.loud_arrivals(factor)), seconds, _is_quiet)
    solo, _ = await _run_live(alone)
    fcfs = await _run_first_come(load)
    outcome, traffic = await _run_live(load)
    measured = _of_quiet(outcome)
    simulated, modelled_solo = (run_simulated(each, DRAIN_SECONDS) for each in (load, alone))
    return {
        "requests_per_second": arrivals.capacity,
        "samples": len(measured),
        "solo_p99_ms": 1000 * _p99(solo.requests),
        "p99_ms": 1000 * _p99(measured),
        "over_solo": _p99(measured) / _p99(solo.requests),
        "simulated_over_solo": _p99(_of_quiet(simulated)) / _p99(modelled_solo.requests),
        **_stages([sent for sent in traffic.sent if _is_quiet(sent.spec)]),
        "fcfs_p50_ms": 1000 * measures.first_token_percentile(_of_quiet(fcfs), 0.5),
        "refused": sum(request.refused for request in measured),
        "throughput": outcome.served / fcfs.served,
        **{f"cores_{name}": traffic.cores[name] for name in PROCESSES},
    }


def _stages(sent: Sequence[SentRequest]) -> Run:
    """The p99 of each stage of requests that ended, and of the delay before they were sent."""
    samples = [each.sample for each in sent]
    late = [1000 * (sample.sent - sample.due) for sample in samples]
    spent = {stage: [s.timing[stage] for s in samples if s.is_ok] for stage in STAGES}
    spent["late"] = late
    return {f"{name}_p99_ms": percentile(sorted(values), 0.99) for name, values in spent.items()}


async def _run_first_come(load: Workload) -> Outcome:
    """Run the load as requests of one tenant, which are served in the order in which they come."""
    specs = [replace(each, tenant=ONE) for each in load.specs]
    outcome, _ = await _run_live(Workload(specs, load.seconds, lambda spec: False))
    for request, original in zip(outcome.requests, load.specs, strict=True):
        request.spec = original
    return outcome


async def _run_live(load: Workload) -> tuple[Outcome, Traffic]:
    tenants = dict.fromkeys((*QUIET, LOUD, ONE), 1.0)
    shape = ClusterShape(tenants, engine_options(WORKER), WORKERS, GATEWAYS)
    async with run_cluster(shape) as cluster:
        traffic = Traffic(cluster, {LOUD: LOUD_SOCKETS, ONE: LOUD_SOCKETS})
        return await traffic.run(load, DRAIN_SECONDS), traffic


async def _measure_weights(seed: int, seconds: float) -> Run:
    found: dict[str, float] = {}
    for count in (2, 4):
        arrivals = TenantArrivals(seed, seconds)
        specs = workloads.merged(
            arrivals.make_arrivals("four", 2.0, [0]),
            arrivals.make_arrivals("one", 2.0, range(1, count)),
        )
        load = Workload(specs, seconds, lambda spec: False)
        shape = ClusterShape(WEIGHTS, engine_options(WORKER), WORKERS, count)
        async with run_cluster(shape) as cluster:
            outcome = await Traffic(cluster, dict.fromkeys(WEIGHTS, LOUD_SOCKETS)).run(load, 0.0)
        simulated = SimulatedCluster((WORKER,) * WORKERS, count, WEIGHTS)
        expected = runs.SimulationRun(Millstream, simulated, load).run(0.0)
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
    """Return the service tokens that each tenant received after `LEVEL_SECONDS`.

    Requests that have not ended are included: the tenant that gets less has more of them.
    """
    generated = {each.request_id: n for engine in outcome.engines for each, n in engine.progress()}
    got = dict.fromkeys(WEIGHTS, 0.0)
    for request in outcome.requests:
        tokens = generated.get(request.request_id, request.generated)
        got[request.spec.tenant] += _service_seen(request, tokens, seconds)
    return got


def _service_seen(request: SimulatedRequest, generated: int, seconds: float) -> float:
    """The service of a request after `LEVEL_SECONDS`, spread evenly from first to last token."""
    if request.first is None:
        return 0.0
    until = request.ended or seconds
    spent = service_tokens(request.spec.prompt_tokens, generated)
    measured = max(0.0, until - max(LEVEL_SECONDS, request.first))
    return spent * measured / max(until - request.first, 1e-6)


def _p99(requests: Sequence[SimulatedRequest]) -> float:
    return measures.first_token_percentile(requests, 0.99)


def _of_quiet(outcome: Outcome) -> list[SimulatedRequest]:
    return [request for request in outcome.requests if _is_quiet(request.spec)]


def _is_quiet(spec: RequestSpec) -> bool:
    return spec.tenant != LOUD

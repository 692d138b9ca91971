"""B3 on a running system: more requests than the workers can serve, over two gateways.

On time, goodput and waste are defined as in the simulator
(`bench/simulation/scenarios/overload.py`). The peak is the most that this system served on time at
any level. It is compared with what FCFS reaches in the simulator, where that knows how long each
output will be.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
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
from bench.live.traffic import Traffic
from bench.reporting import Figure, Run
from bench.simulation import measures
from bench.simulation.baselines import Fcfs
from bench.simulation.runs import Outcome
from bench.simulation.scenario import Setting
from bench.simulation.scenarios import overload
from bench.simulation.scenarios.overload import BURST, CALM, JUDGED, Replay
from bench.simulation.systems import with_policy
from bench.simulation.workloads import Workload
from simulation.request import RequestSpec

DRAIN_SECONDS = 40.0
BURST_BEGINS, BURST_ENDS = 1 / 3, 1 / 2  # as shares of the time
SETTING = Setting(WORKER, TRACES)
CORES = tuple(Figure(f"cores_{name}", f"cores used by {name}") for name in PROCESSES)


def measure(
    name: str, trace: str, replay: Replay, levels: Sequence[float], seeds: int, seconds: float
) -> None:
    """Measure and publish each level, a multiple of the capacity, with each seed.

    Every run has a fresh system.
    """
    found = [asyncio.run(_measure_levels(trace, replay, levels, s, seconds)) for s in range(seeds)]
    reporting.publish(name, describe_setting(seconds), _figures(levels), found)


def measure_burst(seeds: int, seconds: float) -> None:
    """Measure and publish a burst: half of the capacity, then five times as much for a sixth of the
    time, then half again.
    """
    figures = (
        Figure("before_p99_ms", "p99 to first token before the burst, ms"),
        Figure("recovered_s", "time after the burst until it is as before, s", "≤ 10"),
        Figure("simulated_recovered_s", "the same in the simulator, s"),
    )
    found = [asyncio.run(_measure_burst(seed, seconds)) for seed in range(seeds)]
    reporting.publish("live-b3-burst", describe_setting(seconds), figures, found)


def _figures(levels: Sequence[float]) -> tuple[Figure, ...]:
    return (
        Figure("requests_per_second", "capacity of the workers, requests/s"),
        *(
            Figure(f"goodput_{level:g}", f"goodput at {level:g} times, of the peak")
            for level in levels
        ),
        Figure("over_fcfs", f"at {JUDGED:g}: goodput over FCFS's simulated peak"),
        Figure("accepted", f"at {JUDGED:g}: accepted requests"),
        Figure("on_time", f"at {JUDGED:g}: share of them on time", "≥ 0.99"),
        Figure("simulated_on_time", f"at {JUDGED:g}: the same in the simulator"),
        Figure("refused", f"at {JUDGED:g}: refused requests"),
        Figure("refusal_p50_ms", f"at {JUDGED:g}: time to a refusal, p50, ms"),
        Figure("refusal_p99_ms", f"at {JUDGED:g}: time to a refusal, p99, ms", "≤ 10"),
        Figure("wasted", f"at {JUDGED:g}: share of the tokens computed in vain", "≤ 0.02"),
        *CORES,
    )


async def _measure_levels(
    trace: str, replay: Replay, levels: Sequence[float], seed: int, seconds: float
) -> Run:
    rows = overload.sizes(SETTING, trace)
    whole = overload.whole_capacity(SETTING, rows)
    loads, outcomes = {}, {}
    cores: dict[str, float] = {}
    for level in levels:
        specs = replay(rows, level * whole, seconds, Random(seed))
        loads[level] = Workload(_over_gateways(overload.in_time(specs)), seconds)
        outcomes[level], used = await _run_live(loads[level])
        cores = used if level == JUDGED else cores
    goodputs = {level: overload.goodput(found, seconds) for level, found in outcomes.items()}
    simulated = (run_simulated(load, DRAIN_SECONDS, with_policy(Fcfs)) for load in loads.values())
    fcfs = max(overload.goodput(outcome, seconds) for outcome in simulated)
    return {
        "requests_per_second": whole,
        **{f"goodput_{level:g}": got / max(goodputs.values()) for level, got in goodputs.items()},
        "over_fcfs": goodputs[JUDGED] / fcfs,
        "simulated_on_time": _on_time(run_simulated(loads[JUDGED], DRAIN_SECONDS)),
        **_judge(outcomes[JUDGED]),
        **{f"cores_{name}": cores[name] for name in PROCESSES},
    }


def _judge(outcome: Outcome) -> dict[str, float]:
    refusals = [
        1000 * (request.ended - request.spec.at)
        for request in outcome.requests
        if request.refused and request.ended is not None
    ]
    return {
        "accepted": len(overload.accepted(outcome)),
        "on_time": _on_time(outcome),
        "refused": len(refusals),
        "refusal_p50_ms": _percentile(refusals, 0.5),
        "refusal_p99_ms": _percentile(refusals, 0.99),
        "wasted": overload.wasted(outcome),
    }


def _on_time(outcome: Outcome) -> float:
    return measures.share(overload.accepted(outcome), lambda request: request.on_time)


def _percentile(values: list[float], q: float) -> float:
    return sorted(values)[ceil(q * len(values)) - 1] if values else inf


async def _measure_burst(seed: int, seconds: float) -> Run:
    rows = overload.sizes(SETTING, overload.ARENA)
    whole, random = overload.whole_capacity(SETTING, rows), Random(seed)
    begins, ends = BURST_BEGINS * seconds, BURST_ENDS * seconds
    specs: list[RequestSpec] = []
    for start, end, level in ((0.0, begins, CALM), (begins, ends, BURST), (ends, seconds, CALM)):
        arrivals = overload.at_random(rows, level * whole, end - start, random)
        specs += [replace(each, at=each.at + start) for each in overload.in_time(arrivals)]
    load = Workload(_over_gateways(specs), seconds)
    outcome, _ = await _run_live(load)
    before = [request for request in outcome.requests if request.spec.at < begins]
    expected = run_simulated(load, DRAIN_SECONDS)
    return {
        "before_p99_ms": 1000 * measures.first_token_percentile(before, 0.99),
        "recovered_s": overload.recovered(outcome, begins, ends, seconds),
        "simulated_recovered_s": overload.recovered(expected, begins, ends, seconds),
    }


def _over_gateways(specs: Sequence[RequestSpec]) -> list[RequestSpec]:
    """The requests with their gateways in turn."""
    return [replace(each, gateway=number % GATEWAYS) for number, each in enumerate(specs)]


async def _run_live(load: Workload) -> tuple[Outcome, dict[str, float]]:
    shape = ClusterShape(
        {"all": 1.0},
        engine_options(WORKER),
        WORKERS,
        GATEWAYS,
        goal_ms=1000 * overload.GOAL_SECONDS,
        deadline_seconds=overload.DEADLINE_SECONDS,
    )
    async with run_cluster(shape) as cluster:
        traffic = Traffic(cluster, {"all": 4})
        return await traffic.run(load, DRAIN_SECONDS), traffic.cores

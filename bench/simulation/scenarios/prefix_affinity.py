"""B5: many workers, each with a prefix cache: what is found there, and how even the load is."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from random import Random

from bench.simulation import workloads
from bench.simulation.baselines import Fcfs
from bench.simulation.runs import Outcome, SimulationRun
from bench.simulation.scenario import Figure, Scenario, Setting, Values
from bench.simulation.systems import Build, Millstream, SimulatedCluster, with_policy
from bench.simulation.workloads import Workload
from simulation.prefix_cache import BLOCK_TOKENS, PrefixCacheModel
from simulation.request import RequestSpec
from simulation.step_model import StepModel

SECONDS = 900.0
DRAIN_SECONDS = 600.0
WORKERS = 8
TRACE = "mooncake_conversation.csv"
# The default worker would need eleven of itself for the prompts alone, and some fit no A10G
WORKER = StepModel(
    step_ms=20,
    sequence_ms=0.1,
    context_us=0.02,
    prefill_ms=5,
    token_ms=0.05,
    kv_tokens=4_000_000,
    max_sequences=128,
    max_batch_tokens=8192,
)
SYSTEMS: dict[str, Build] = {"millstream": Millstream, "fcfs": with_policy(Fcfs)}


def measure(setting: Setting, seed: int) -> Values:
    """A quarter of an hour of Mooncake's conversations, beginning at a time drawn by the seed."""
    rows = workloads.trace(setting.traces / TRACE, _parse_row)
    begins = Random(seed).uniform(0, rows[-1].at - SECONDS)
    specs = [
        replace(row, at=row.at - begins) for row in rows if begins <= row.at < begins + SECONDS
    ]
    cluster = SimulatedCluster((WORKER,) * WORKERS, caches_prefixes=True)
    best = _single_cache_hits(specs)
    values = {
        name: _values(
            SimulationRun(build, cluster, Workload(specs, SECONDS)).run(DRAIN_SECONDS), best
        )
        for name, build in SYSTEMS.items()
    }
    return {"single cache": {"hits": best}} | values


def _parse_row(row: dict[str, str]) -> RequestSpec:
    blocks = tuple(int(block) for block in row["prefix_blocks_512"].split())
    return replace(workloads.sized(row), blocks=blocks)


def _single_cache_hits(specs: Sequence[RequestSpec]) -> float:
    """The fraction of prompt tokens that one cache without bounds would find."""
    cache, found = PrefixCacheModel(sum(len(each.blocks) for each in specs) * BLOCK_TOKENS), 0
    for each in specs:
        found += min(cache.match_tokens(each.blocks), each.prompt_tokens)
        cache.insert(each.blocks)
    return found / sum(each.prompt_tokens for each in specs)


def _values(outcome: Outcome, best: float) -> dict[str, float]:
    whole = sum(request.spec.prompt_tokens for request in outcome.requests)
    hits = sum(request.hit_tokens for request in outcome.requests) / whole
    busy = [engine.busy_seconds for engine in outcome.engines]
    return {
        "hits": hits,
        "of_best": hits / best,
        "load": max(busy) / (sum(busy) / len(busy)) if any(busy) else inf,
    }


SCENARIOS = (
    Scenario(
        "b5",
        "B5: Mooncake's conversations on 8 workers",
        (
            Figure("hits", "prompt tokens found in a cache", None, "higher", "single cache 0.348"),
            Figure("of_best", "that over a single cache's", 0.8, "higher"),
            Figure("load", "busiest worker over the mean", 1.25),
        ),
        measure,
    ),
)

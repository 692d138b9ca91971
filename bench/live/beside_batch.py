"""B4 on a running system: interactive requests beside a batch that fills every slot.

The interactive load is half of the workers' capacity. It is sent once by itself, and once while
`/v1/batches` runs a batch of another tenant that is larger than what is left; the figure is the p99
of the time to first token beside the batch over that without it.
"""

import asyncio
import json
from collections.abc import Sequence
from math import ceil
from random import Random

import httpx

from bench import reporting
from bench.live.cluster import MODEL, Cluster, ClusterShape, engine_options, run_cluster
from bench.live.shared_setting import TRACES, WORKER, WORKERS, describe_setting
from bench.live.traffic import Traffic
from bench.reporting import Figure, Run
from bench.simulation import measures, workloads
from bench.simulation.runs import Outcome, capacity
from bench.simulation.scenarios.mixed_priorities import (
    BATCH,
    CAPACITY_ROWS,
    INTERACTIVE,
    INTERACTIVE_SHARE,
    TRACE,
)
from bench.simulation.workloads import Workload
from simulation.request import RequestSpec
from tests.support.eventually import eventually

DRAIN_SECONDS = 30.0
FULL_LINES = 32  # of the batch that have ended: by then it has had every slot
COMPLETIONS = "/v1/completions"

FIGURES = (
    Figure("requests_per_second", "interactive requests/s"),
    Figure("alone_p99_ms", "alone: p99 to first token, ms"),
    Figure("beside_p99_ms", "beside the batch: p99 to first token, ms"),
    Figure("over_alone", "p99 beside the batch over p99 alone", "≤ 1.3"),
    Figure("lines_per_second", "the batch's lines/s beside it"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, each on a fresh system with other arrivals, and publish."""
    found = [asyncio.run(_measure(seed, seconds)) for seed in range(runs)]
    reporting.publish("live-b4-jobs", describe_setting(seconds), FIGURES, found)


async def _measure(seed: int, seconds: float) -> Run:
    rows, random = workloads.trace(TRACES / TRACE, workloads.sized), Random(seed)
    whole = WORKERS * capacity(WORKER, tuple(rows[:CAPACITY_ROWS]))
    rate = INTERACTIVE_SHARE * whole
    arrivals = workloads.poisson(INTERACTIVE, rate, seconds, random)
    load = Workload(list(workloads.resized(arrivals, rows, random)), seconds)
    lines = list(workloads.resized([BATCH] * ceil(2 * whole * seconds), rows, random))
    tenants = dict.fromkeys((INTERACTIVE.tenant, BATCH.tenant), 1.0)
    shape = ClusterShape(tenants, engine_options(WORKER), WORKERS, gateways=1, jobs=1)
    async with run_cluster(shape) as cluster:
        alone = await Traffic(cluster).run(load, DRAIN_SECONDS)
        async with RunningBatch(cluster, lines) as batch:
            await eventually(lambda: batch.has_ended(FULL_LINES), DRAIN_SECONDS)
            before = await batch.count_ended()
            beside = await Traffic(cluster).run(load, DRAIN_SECONDS)
            ended = await batch.count_ended() - before
            assert not await batch.is_over(), "the batch was too small to fill the slots"
    return {
        "requests_per_second": rate,
        "alone_p99_ms": 1000 * _p99(alone),
        "beside_p99_ms": 1000 * _p99(beside),
        "over_alone": _p99(beside) / _p99(alone),
        "lines_per_second": ended / seconds,
    }


def _p99(outcome: Outcome) -> float:
    return measures.first_token_percentile(outcome.requests, 0.99)


class RunningBatch:
    """A batch of the other tenant, created when the block begins."""

    def __init__(self, cluster: Cluster, lines: Sequence[RequestSpec]) -> None:
        key = cluster.address(BATCH.tenant, 0).key
        headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(base_url=cluster.urls[0], headers=headers, timeout=60)
        self._lines, self._path = lines, ""

    async def __aenter__(self) -> "RunningBatch":
        data = b"".join(_line(index, spec) for index, spec in enumerate(self._lines))
        file = await self._client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}
        )
        body = {"input_file_id": file.json()["id"], "endpoint": COMPLETIONS}
        made = await self._client.post("/v1/batches", json={**body, "completion_window": "24h"})
        made.raise_for_status()
        self._path = f"/v1/batches/{made.json()['id']}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def count_ended(self) -> int:
        counts = (await self._client.get(self._path)).json()["request_counts"]
        return int(counts["completed"] + counts["failed"])

    async def has_ended(self, least: int) -> bool:
        return await self.count_ended() >= least

    async def is_over(self) -> bool:
        return str((await self._client.get(self._path)).json()["status"]) != "in_progress"


def _line(index: int, spec: RequestSpec) -> bytes:
    body = {"model": MODEL, "prompt": "x" * spec.prompt_tokens, "max_tokens": spec.output_tokens}
    line = {"custom_id": f"id-{index}", "method": "POST", "url": COMPLETIONS, "body": body}
    return json.dumps(line).encode() + b"\n"

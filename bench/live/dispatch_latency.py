"""B6: how soon an accepted request is at a worker, and what the dispatcher spends on a request.

(a) 500 requests/s over two gateways: from a gateway's acceptance to a worker's pull, by the clock
of the machine; acceptance is told in whole milliseconds, so that it seems half a one longer. One
worker, whose engine answers at once: what it takes of the two cores is no part of the figure.
(b) Requests already queued, as fast as two workers take them: CPU time of the dispatcher for each,
from its index to its settling.
"""

import asyncio
import time
from random import Random

from bench import reporting
from bench.live.cluster import MOCK, MODEL, Cluster, ClusterShape, run_cluster
from bench.live.shared_setting import PROCESSES, describe_setting
from bench.live.traffic import Traffic
from bench.reporting import Figure, Run
from bench.simulation import workloads
from bench.simulation.workloads import Workload
from millstream.bench.load_statistics import percentile
from registry.store import Registry
from simulation.request import RequestSpec
from streams import messages
from streams.broker.connection import connect
from streams.messages import Request, Sampling
from streams.subjects import Lane, Priority
from tests.support.eventually import eventually
from tests.support.services import BrokerClient

RATE, PROMPT_TOKENS = 500.0, 16
TENANTS = tuple(f"t{number}" for number in range(10))
WARM_SECONDS = 3.0  # of which nothing is judged
GATEWAYS, SATURATED_WORKERS = 2, 2
QUEUED, SIDE_BY_SIDE = 15_000, 64
ENGINE = {"ttft_ms": 0.0, "itl_ms": 0.0, "sequences": 1024}

FIGURES = (
    Figure("requests", "requests"),
    Figure("late_p99_ms", "sent later than they were due: p99, ms"),
    Figure("start_p50_ms", "acceptance to worker, p50, ms", "≤ 5"),
    Figure("start_p99_ms", "p99, ms", "≤ 25"),
    Figure("queue_p99_ms", "acceptance to dispatch alone, p99, ms"),
    *(Figure(f"cores_{name}", f"cores used by {name}") for name in PROCESSES),
    Figure("dispatcher_us", "saturated: dispatcher CPU of a request, µs"),
    Figure("requests_per_core", "so many a second on one core", "≥ 3,000"),
    Figure("requests_per_second", "requests/s of that run"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure on fresh systems, and publish."""
    workers = f"1, saturated {SATURATED_WORKERS}"
    setting = {**describe_setting(seconds), "workers": workers, "worker": "the mock engine"}
    found = [asyncio.run(_run(seed, seconds)) for seed in range(runs)]
    reporting.publish("live-b6", setting | {"rate": RATE, "queued": QUEUED}, FIGURES, found)


async def _run(seed: int, seconds: float) -> Run:
    return {**await _measure_paced(seed, seconds), **await _measure_saturated()}


async def _measure_paced(seed: int, seconds: float) -> Run:
    random = Random(seed)
    arrivals = workloads.poisson(RequestSpec(0, "", PROMPT_TOKENS, 1), RATE, seconds, random)
    asked = [_of_some_tenant(each, random) for each in arrivals]
    async with run_cluster(_shape(GATEWAYS, 1)) as plant:
        traffic = Traffic(plant)
        await traffic.run(Workload(asked, seconds), 10.0)
    samples = [sent.sample for sent in traffic.sent if sent.asked.at >= WARM_SECONDS]
    assert all(sample.is_ok for sample in samples), {s.code for s in samples}
    late = sorted(1000 * (sample.sent - sample.due) for sample in samples)
    queue = sorted(sample.timing["queue"] for sample in samples)
    starts = sorted(sample.timing["queue"] + sample.timing["dispatch"] for sample in samples)
    return {
        "requests": len(samples),
        "late_p99_ms": percentile(late, 0.99),
        "start_p50_ms": percentile(starts, 0.5),
        "start_p99_ms": percentile(starts, 0.99),
        "queue_p99_ms": percentile(queue, 0.99),
        **{f"cores_{name}": traffic.cores[name] for name in PROCESSES},
    }


def _of_some_tenant(asked: RequestSpec, random: Random) -> RequestSpec:
    return RequestSpec(
        asked.at,
        random.choice(TENANTS),
        asked.prompt_tokens,
        asked.output_tokens,
        gateway=random.randrange(GATEWAYS),
    )


def _shape(gateways: int, workers: int) -> ClusterShape:
    tenants = dict.fromkeys(TENANTS, 1.0)
    return ClusterShape(tenants, ENGINE, workers, gateways, MOCK, max_queued=QUEUED)


async def _measure_saturated() -> Run:
    async with (
        run_cluster(_shape(1, SATURATED_WORKERS)) as plant,
        connect(plant.nats, "bench") as broker,
    ):
        client = BrokerClient(broker, await Registry.open(broker))
        plant.start_cpu_meter()
        began = time.perf_counter()
        await _fill(client)
        await eventually(client.is_idle, 300)
        return _spent(plant, time.perf_counter() - began)


def _spent(plant: Cluster, seconds: float) -> Run:
    spent = plant.cores_used()["dispatcher"] * seconds / QUEUED
    return {
        "dispatcher_us": spent * 1e6,
        "requests_per_core": 1 / spent,
        "requests_per_second": QUEUED / seconds,
    }


async def _fill(client: BrokerClient) -> None:
    tokens = messages.pack_tokens([1] * PROMPT_TOKENS)
    payload = Request("generate", tokens, sampling=Sampling(max_tokens=1)).pack()
    numbers = iter(range(QUEUED))

    async def enter() -> None:
        for number in numbers:
            envelope = client.envelope(
                PROMPT_TOKENS, 1, tenant=TENANTS[number % len(TENANTS)], deadline_seconds=600
            )
            await client.enqueue(envelope, payload, Lane(envelope.tenant, MODEL, Priority.STANDARD))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(SIDE_BY_SIDE):
            tasks.create_task(enter())

"""B6: measures how soon an accepted request is at a worker, and the dispatcher's CPU per request.

(a) 500 requests/s over two gateways: from a gateway's acceptance to a worker's pull, by the
machine's clock; acceptance is reported in whole milliseconds, which makes the time appear half a
millisecond longer. There is one worker, whose engine answers at once, so that its use of the two
cores is no part of the figure. (b) Requests already queued, as fast as two workers pull them: CPU
time of the dispatcher for each, from its index to its settling.
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
from streams.broker.broker_client import connect
from streams.messages import Request, Sampling
from streams.subjects import Lane, Priority
from tests.support.eventually import eventually
from tests.support.services import BrokerClient

RATE, PROMPT_TOKENS = 500.0, 16
TENANTS = tuple(f"t{number}" for number in range(10))
WARM_SECONDS = 3.0  # requests sent before are not counted
GATEWAYS, SATURATED_WORKERS = 2, 2
QUEUED, SIDE_BY_SIDE = 15_000, 64
ENGINE = {"ttft_ms": 0.0, "itl_ms": 0.0, "sequences": 1024}

FIGURES = (
    Figure("requests", "requests"),
    Figure("late_p99_ms", "delay of sending after the due time, p99, ms"),
    Figure("start_p50_ms", "acceptance to worker, p50, ms", "≤ 5"),
    Figure("start_p99_ms", "acceptance to worker, p99, ms", "≤ 25"),
    Figure("queue_p99_ms", "acceptance to dispatch alone, p99, ms"),
    *(Figure(f"cores_{name}", f"cores used by {name}") for name in PROCESSES),
    Figure("dispatcher_us", "saturated: dispatcher CPU per request, µs"),
    Figure("requests_per_core", "saturated: requests/s that one core could dispatch", "≥ 3,000"),
    Figure("requests_per_second", "saturated: requests/s of that run"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times on fresh systems, and publish."""
    workers = f"1, saturated {SATURATED_WORKERS}"
    setting = {**describe_setting(seconds), "workers": workers, "worker": "the mock engine"}
    found = [asyncio.run(_run(seed, seconds)) for seed in range(runs)]
    reporting.publish("live-b6", setting | {"rate": RATE, "queued": QUEUED}, FIGURES, found)


async def _run(seed: int, seconds: float) -> Run:
    return {**await _measure_paced(seed, seconds), **await _measure_saturated()}


async def _measure_paced(seed: int, seconds: float) -> Run:
    random = Random(seed)
    arrivals = workloads.poisson(RequestSpec(0, "", PROMPT_TOKENS, 1), RATE, seconds, random)
    specs = [_assign_tenant(each, random) for each in arrivals]
    async with run_cluster(_shape(GATEWAYS, 1)) as cluster:
        traffic = Traffic(cluster)
        await traffic.run(Workload(specs, seconds), 10.0)
    samples = [sent.sample for sent in traffic.sent if sent.spec.at >= WARM_SECONDS]
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


def _assign_tenant(spec: RequestSpec, random: Random) -> RequestSpec:
    """The request at a random tenant and gateway."""
    return RequestSpec(
        spec.at,
        random.choice(TENANTS),
        spec.prompt_tokens,
        spec.output_tokens,
        gateway=random.randrange(GATEWAYS),
    )


def _shape(gateways: int, workers: int) -> ClusterShape:
    tenants = dict.fromkeys(TENANTS, 1.0)
    return ClusterShape(tenants, ENGINE, workers, gateways, MOCK, max_queued=QUEUED)


async def _measure_saturated() -> Run:
    async with (
        run_cluster(_shape(1, SATURATED_WORKERS)) as cluster,
        connect(cluster.nats, "bench") as broker,
    ):
        client = BrokerClient(broker, await Registry.open(broker))
        cluster.start_cpu_meter()
        began = time.perf_counter()
        await _fill(client)
        await eventually(client.is_idle, 300)
        return _dispatcher_cost(cluster, time.perf_counter() - began)


def _dispatcher_cost(cluster: Cluster, seconds: float) -> Run:
    cpu_seconds = cluster.cores_used()["dispatcher"] * seconds / QUEUED  # per request
    return {
        "dispatcher_us": cpu_seconds * 1e6,
        "requests_per_core": 1 / cpu_seconds,
        "requests_per_second": QUEUED / seconds,
    }


async def _fill(client: BrokerClient) -> None:
    tokens = messages.pack_tokens([1] * PROMPT_TOKENS)
    payload = Request("generate", tokens, sampling=Sampling(max_tokens=1)).pack()
    numbers = iter(range(QUEUED))

    async def enqueue_remaining() -> None:
        for number in numbers:
            envelope = client.envelope(
                PROMPT_TOKENS, 1, tenant=TENANTS[number % len(TENANTS)], deadline_seconds=600
            )
            await client.enqueue(envelope, payload, Lane(envelope.tenant, MODEL, Priority.STANDARD))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(SIDE_BY_SIDE):
            tasks.create_task(enqueue_remaining())

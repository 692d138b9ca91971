"""One run: a fresh cluster, the plan's load and strikes, then what is stored: a history."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import TypeVar

import nats.errors

from streams.broker.broker_client import Broker
from tests.chaos import network_partition, stored_state
from tests.chaos.batch_client import BatchClient
from tests.chaos.cluster import KEYS, Cluster, Footprint
from tests.chaos.fault_actions import ACTIONS
from tests.chaos.history import (
    Accepted,
    AccessProbed,
    AccessViolated,
    Event,
    FaultInjected,
    FootprintChange,
    MemorySample,
    RunStarted,
    Submitted,
)
from tests.chaos.plan import TENANTS, Fault, FaultInjection, PlannedRequest, plan, tenant_of
from tests.chaos.producer_client import ProducerClient
from tests.chaos.recording_client import LoadClient, RecordingClient
from tests.chaos.sdk_client import SdkClient
from tests.chaos.slow_client import SlowClient
from tests.chaos.stored_state import QUEUES
from tests.support.accounts_server import connect
from tests.support.eventually import eventually

C = TypeVar("C", bound=LoadClient)
PATIENCE_SECONDS = 90.0  # for the ends, after everything was asked, done and undone
SETTLE_SECONDS = 30.0  # for what is not waited for: acknowledgements, sockets that close
PROBES = 5
SAMPLE_SECONDS = 10.0
WARM_UP_REQUESTS = 16  # requests before the load: what is allocated once is no leak

CLIENTS: dict[str, Callable[..., LoadClient]] = {
    "plain": RecordingClient,
    "sdk": SdkClient,
    "slow": SlowClient,
}


class Recorder:
    """The history as it grows; its clock begins with the load."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._began = time.monotonic()

    def clock(self) -> float:
        return round(time.monotonic() - self._began, 4)

    def add(self, event: Event) -> None:
        self.events.append(event)

    def begin(self, began: RunStarted) -> None:
        """Forget what was recorded so far."""
        self.events, self._began = [began], time.monotonic()


async def run_fault(fault: Fault, seed: int, home: Path) -> list[Event]:
    """What happened. The processes' logs stay in `home`."""
    with network_partition.own_namespace() if fault.shape.can_partition else nullcontext():
        cluster = Cluster(fault.shape, home)
        try:
            await cluster.start()
            return await _recorded(cluster, fault, seed)
        finally:
            await cluster.close()


async def _recorded(cluster: Cluster, fault: Fault, seed: int) -> list[Event]:
    recorder, planned = Recorder(), plan(fault, seed)
    async with _clients(cluster, RecordingClient, fault.load.clients, recorder) as clients:
        await _warm_up(clients)
    tenant = TENANTS[0]
    batch = BatchClient(tenant, KEYS[tenant], cluster.gateways, recorder.clock, recorder.add)
    before = await _footprints(cluster)
    await batch.submit(planned.lines)
    recorder.begin(RunStarted(fault.name, seed, list(fault.excused), fault.forgets, fault.wipes))
    kind = CLIENTS[fault.load.kind]
    batch.note_begin()
    async with (
        _clients(cluster, kind, fault.load.clients, recorder) as clients,
        _producers(cluster, recorder) as producers,
    ):
        cluster.readers = {c.name: c for c in clients if isinstance(c, SlowClient)}
        async with _sampling(cluster, recorder), asyncio.TaskGroup() as tasks:
            tasks.create_task(_load(planned.requests, clients, recorder))
            tasks.create_task(_load(planned.produced, producers, recorder))
            for strike in planned.injections:
                random = Random(f"{seed} {strike.at}")  # each strike may hit another one
                tasks.create_task(_inject(cluster, strike, random, recorder))
        await asyncio.gather(_all_ended([*clients, *producers]), batch.read(PATIENCE_SECONDS))
    async with _clients(cluster, RecordingClient, len(TENANTS), recorder) as strangers:
        await _probe(strangers, recorder)
    async with connect(cluster.brokers.direct, "chaos") as broker:
        await _wait_until_idle(broker)
        recorder.events += await stored_state.read_stored_events(broker, cluster.shards)
    for node, found in cluster.brokers.violations().items():
        recorder.events += [AccessViolated(node, what) for what in dict.fromkeys(found)]
    recorder.events += _footprint_changes(before, await _footprints(cluster, before))
    return recorder.events


@asynccontextmanager
async def _clients(
    cluster: Cluster, kind: Callable[..., C], count: int, recorder: Recorder
) -> AsyncIterator[list[C]]:
    """Clients that run; each tenant's begin at different gateways."""
    urls, made = cluster.gateways, list[C]()
    for number in range(count):
        tenant, first = tenant_of(number), number // len(TENANTS) % len(urls)
        order = urls[first:] + urls[:first]
        name = f"client-{number}"
        made.append(kind(name, tenant, KEYS[tenant], order, recorder.clock, recorder.add))
    async with _running(made):
        yield made


@asynccontextmanager
async def _producers(cluster: Cluster, recorder: Recorder) -> AsyncIterator[list[ProducerClient]]:
    """A producer of each tenant."""
    made = [
        ProducerClient(
            f"producer-{number}",
            tenant,
            cluster.brokers.direct,
            cluster.producer_file(tenant),
            recorder.clock,
            recorder.add,
        )
        for number, tenant in enumerate(TENANTS)
    ]
    async with _running(made):
        yield made


@asynccontextmanager
async def _running(made: Sequence[LoadClient]) -> AsyncIterator[None]:
    """Clients run until the block ends."""
    running = [asyncio.create_task(client.run(), name=client.name) for client in made]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


@asynccontextmanager
async def _sampling(cluster: Cluster, recorder: Recorder) -> AsyncIterator[None]:
    """Note meanwhile what each process holds."""

    async def sample() -> None:
        while True:
            for name, footprint in (cluster.footprints() | cluster.brokers_footprints()).items():
                recorder.add(MemorySample(recorder.clock(), name, footprint.pid, footprint.rss))
            await asyncio.sleep(SAMPLE_SECONDS)

    async with asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(sample(), name="sampling")
        yield
        sampling.cancel()


async def _warm_up(clients: Sequence[RecordingClient]) -> None:
    for number in range(WARM_UP_REQUESTS):
        ask = PlannedRequest(f"warm-{number}", 0, 0, "warm", number, 8, None)
        await clients[number % len(clients)].submit(ask)
    await _all_ended(clients)


async def _load(
    asks: Sequence[PlannedRequest], clients: Sequence[LoadClient], recorder: Recorder
) -> None:
    for ask in asks:
        await asyncio.sleep(max(0.0, ask.at - recorder.clock()))
        await clients[ask.client].submit(ask)


async def _inject(
    cluster: Cluster, strike: FaultInjection, random: Random, recorder: Recorder
) -> None:
    """Do it, wait, undo it; to all of several at once."""
    do, undo = ACTIONS[strike.action]
    await asyncio.sleep(max(0.0, strike.at - recorder.clock()))
    names = await cluster.resolve_targets(strike.target, random)
    for name in names:
        recorder.add(FaultInjected(recorder.clock(), strike.action, name))
        await do(cluster, name)
    await asyncio.sleep(strike.seconds)
    for name in names:
        await undo(cluster, name)
        recorder.add(FaultInjected(recorder.clock(), strike.action, name, undone=True))


async def _all_ended(clients: Sequence[LoadClient]) -> None:
    """What does not end in time stays without an end in the history."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(client.idle for client in clients) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


async def _probe(clients: list[RecordingClient], recorder: Recorder) -> None:
    """Have tenants try to read what was said to others."""
    owners = {event.request: event.tenant for event in recorder.events if type(event) is Submitted}
    accepted = {e.request_id: e for e in recorder.events if isinstance(e, Accepted)}
    chosen = list(accepted.values())[:: max(1, len(accepted) // PROBES)]
    for event in chosen:
        stranger = next(c for c in clients if c.tenant != owners[event.request])
        await stranger.probe(event.request_id)

    def answered() -> bool:
        return sum(isinstance(event, AccessProbed) for event in recorder.events) == len(chosen)

    await eventually(answered, PATIENCE_SECONDS)


async def _wait_until_idle(broker: Broker) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        try:
            if not sum([await stored_state.message_count(broker, each) for each in QUEUES]):
                return
        except (nats.errors.Error, TimeoutError):
            continue  # a leader is being elected
        await asyncio.sleep(0.1)


async def _footprints(
    cluster: Cluster, before: Mapping[str, Footprint] | None = None
) -> dict[str, Footprint]:
    """What each service holds once its descriptors are as `before`, or have had time to be.

    The brokers are left out: their memory is what the streams hold.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        await asyncio.sleep(0.5)
        now = cluster.footprints()
        known = before or now
        grown = any(f.descriptors > known.get(name, f).descriptors for name, f in now.items())
        if not grown or time.monotonic() > deadline:
            return now


def _footprint_changes(
    before: Mapping[str, Footprint], after: Mapping[str, Footprint]
) -> Iterator[FootprintChange]:
    """Of the processes that are the same."""
    for name, then in before.items():
        now = after.get(name, then)
        if now.pid == then.pid:
            yield FootprintChange(name, then.rss, now.rss, then.descriptors, now.descriptors)

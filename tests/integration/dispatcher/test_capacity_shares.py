"""Room by priority, by part and by reservation, on the real path: broker, dispatcher, workers."""

from collections.abc import Sequence
from functools import partial

from nats.aio.msg import Msg

import dispatcher.service
import gpu_worker.service
from registry.tenant_records import Tenant
from registry.tenants import Tenants
from simulation.step_model import StepModel
from streams import subjects
from streams.messages import Heartbeat
from streams.subjects import Priority
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

PLACES, KV = 4, 1_000_000
SLOW = {"ttft_ms": 1, "itl_ms": 10, "sequences": PLACES, "kv_tokens": KV}
LONG = 3000  # tokens: half a minute, longer than any test


def begun(c: BrokerClient, requests: Sequence[str]) -> int:
    return sum(bool(c.attempts(request)) for request in requests)


def none_has_ended(c: BrokerClient, requests: Sequence[str]) -> bool:
    return not any(c.terminal(request) for request in requests)


async def end(c: BrokerClient, requests: Sequence[str]) -> None:
    """Cancel what is left, so that the services need not wait for it."""

    async def ended() -> bool:
        left = [request for request in requests if not c.terminal(request)]
        for request in left:
            await c.cancel(request)
        return not left

    await eventually(ended)


async def test_a_worker_full_of_batch_work_takes_an_urgent_request_at_once(nats_url: str) -> None:
    """Batch work yields within a step; credit has to say so, or nobody would ask it to."""
    async with (
        broker_client(nats_url, lease_seconds=30, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        batch = [await c.send(max_tokens=LONG, priority=Priority.BATCH) for _ in range(10)]
        await eventually(lambda: begun(c, batch) >= PLACES)
        urgent = await c.send(max_tokens=2, priority=Priority.INTERACTIVE)
        await eventually(lambda: c.terminal(urgent))
        assert none_has_ended(c, batch)
        await end(c, batch)


async def test_what_gave_way_goes_on_without_a_gap(nats_url: str) -> None:
    """Its tokens are those that it would have had, each once."""
    async with (
        broker_client(nats_url, lease_seconds=30, **{**SLOW, "itl_ms": 2, "sequences": 1}) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        batch = await c.send(max_tokens=300, priority=Priority.BATCH)
        await eventually(lambda: batch in c.records and c.tokens(batch))
        urgent = await c.send(max_tokens=20)
        await eventually(lambda: c.terminal(urgent))
        assert none_has_ended(c, [batch])
        await eventually(lambda: c.terminal(batch))
        alone = await c.send(max_tokens=300, priority=Priority.BATCH)
        await eventually(lambda: c.terminal(alone))
        assert c.tokens(batch) == c.tokens(alone)


async def test_a_tenants_flood_leaves_the_others_their_part(nats_url: str) -> None:
    """It fills the fleet, and gives way in it to whoever asks for less than a part."""
    async with (
        broker_client(nats_url, lease_seconds=30, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        first = await c.send(tenant="quiet", max_tokens=2)
        await eventually(lambda: c.terminal(first))
        flood = [await c.send(tenant="loud", max_tokens=LONG) for _ in range(50)]
        await eventually(lambda: begun(c, flood) >= PLACES // 2)
        for _ in range(3):
            request = await c.send(tenant="quiet", max_tokens=2)
            await eventually(partial(c.terminal, request))
        assert none_has_ended(c, flood)
        await end(c, flood)


async def test_reserved_capacity_is_kept_for_its_tenant(nats_url: str) -> None:
    """Half of the fleet is gold's, whether it uses it or not."""
    async with broker_client(nats_url, lease_seconds=30, **SLOW) as c:
        tenants = await Tenants.open(c.broker)
        await tenants.upsert(Tenant(name="gold", reserved_tokens=KV // 2))
        await tenants.close()
        async with (
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url)),
        ):
            others = [await c.send(tenant="other", max_tokens=LONG) for _ in range(20)]
            await eventually(lambda: begun(c, others) >= PLACES // 2)
            gold = [await c.send(tenant="gold", max_tokens=2) for _ in range(PLACES // 2)]
            await eventually(lambda: all(c.terminal(request) for request in gold))
            assert begun(c, others) == PLACES // 2
            await end(c, others)


async def test_beats_tell_how_far_requests_have_come(nats_url: str) -> None:
    """The dispatcher charges long answers while they run, by their place in WORK."""
    beats: list[Heartbeat] = []

    async def on_beat(msg: Msg) -> None:
        beats.append(Heartbeat.unpack(msg.data))

    async with broker_client(nats_url, lease_seconds=30, **SLOW) as c:
        await c.broker.subscribe(subjects.fleet_of("mock"), on_beat)
        async with (
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url)),
        ):
            request = await c.send(max_tokens=LONG)

            def told() -> bool:
                counts = [tokens for beat in beats for _, tokens in beat.progress]
                return len(counts) > 2 and counts[0] < counts[-1]

            await eventually(told)
            assert len({seq for beat in beats for seq, _ in beat.progress}) == 1
            await end(c, [request])


async def test_beats_tell_what_a_load_took_and_the_room_of_a_modelled_machine(
    nats_url: str,
) -> None:
    """A planner knows a machine type by these numbers."""
    beats: list[Heartbeat] = []

    async def on_beat(msg: Msg) -> None:
        beats.append(Heartbeat.unpack(msg.data))

    async with broker_client(nats_url) as c:
        await c.broker.subscribe(subjects.fleet_of("mock"), on_beat)
        modelled = StepModel(max_sequences=3, kv_tokens=500)
        settings = worker_settings(nats_url, type="small", step_model=modelled)
        async with running(gpu_worker.service, settings):
            await eventually(lambda: beats and beats[-1].load)
            beat = beats[-1]
            assert (beat.type, beat.max_sequences, beat.kv_tokens) == ("small", 3, 500)
            assert beat.load["load_seconds"] > 0
            assert (beat.load["weight_bytes"], beat.load["kv_bytes_per_token"]) == (0, 0)

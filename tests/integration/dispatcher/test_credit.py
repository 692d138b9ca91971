"""Late binding: work goes out as workers have room for it, and to the version that was meant."""

import asyncio
import random
from collections import Counter

import dispatcher.service
import gpu_worker.service
from streams import topology
from streams.subjects import Priority
from tests.support.eventually import eventually
from tests.support.services import (
    BrokerClient,
    broker_client,
    broker_client_of,
    dispatcher_settings,
    model_with_versions,
    running,
    worker_settings,
)
from tests.support.versions import make_version

FOUR = {"ttft_ms": 1, "itl_ms": 1, "sequences": 4}


def workers_of(c: BrokerClient, requests: list[str]) -> Counter[str]:
    started = [c.records[request][0] for request in requests]
    return Counter(record["worker"] for record in started)


async def test_a_worker_is_never_sent_much_more_than_it_has_room_for(nats_url: str) -> None:
    """What has left the queue is out of reach of fairness and priority: 4, 2, and 2 on the way."""
    async with (
        broker_client(nats_url, **FOUR) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        requests = [await c.send(max_tokens=10) for _ in range(100)]
        most = 0

        async def all_ended() -> bool:
            nonlocal most
            most = max(most, await c.message_count(topology.WORK))
            return all(c.terminal(request) for request in requests)

        await eventually(all_ended)
        assert most <= 4 + 2 + 2


async def test_two_workers_share_the_work(nats_url: str) -> None:
    """Each pulls what it has room for; nobody assigns anything."""
    async with (
        broker_client(nats_url, **FOUR) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, id="w1")),
        running(gpu_worker.service, worker_settings(nats_url, id="w2")),
    ):
        requests = [await c.send(max_tokens=20) for _ in range(60)]
        await eventually(lambda: all(c.terminal(request) for request in requests))
        shares = workers_of(c, requests)
        assert min(shares["w1"], shares["w2"]) >= 15


async def test_a_higher_priority_overtakes_what_is_queued(nats_url: str) -> None:
    """Only the few that are already bound to the worker come before it."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=5, sequences=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        batch = [await c.send(priority=Priority.BATCH) for _ in range(30)]
        await eventually(lambda: c.attempts(batch[0]))
        urgent = await c.send(priority=Priority.INTERACTIVE)
        await eventually(lambda: c.terminal(urgent))
        assert sum(bool(c.terminal(request)) for request in batch) <= 8


async def test_a_pinned_version_is_served_by_that_version(nats_url: str) -> None:
    """`model@version`, whatever the default is."""
    async with (
        broker_client_of(nats_url, model_with_versions("1", "2", **FOUR)) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=("mock@1",))),
        running(gpu_worker.service, worker_settings(nats_url, model=("mock@2",))),
    ):

        async def knows_both() -> bool:
            told = await c.report()
            return told is not None and len(told["workers"]) == 2

        await eventually(knows_both)
        pinned, free = await c.send(version="2"), await c.send()
        await eventually(lambda: c.terminal(pinned) and c.terminal(free))
        assert c.records[pinned][0]["version"] == "2"
        assert c.records[free][0]["version"] == "1"


async def test_a_version_without_workers_holds_up_nobody_else(nats_url: str) -> None:
    """Its requests wait, the rest of the model's go past them."""
    async with (
        broker_client_of(nats_url, model_with_versions("1", "2", **FOUR)) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=("mock@1",))),
    ):
        waits = await c.send(version="2", priority=Priority.INTERACTIVE)
        others = [await c.send() for _ in range(20)]
        await eventually(lambda: all(c.terminal(request) for request in others))
        assert waits not in c.records
        async with running(gpu_worker.service, worker_settings(nats_url, model=("mock@2",))):
            await eventually(lambda: c.terminal(waits))


async def test_a_version_that_does_not_exist_ends_its_request(nats_url: str) -> None:
    """The gateway refuses it; a version may be removed while a request for it waits."""
    async with (
        broker_client(nats_url, **FOUR) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        request = await c.send(version="9")
        terminal = await eventually(lambda: c.terminal(request))
        assert terminal["code"] == "model_not_found"
        assert "'9'" in terminal["message"]
        await eventually(c.is_idle)


async def test_a_new_default_version_serves_what_waits(nats_url: str) -> None:
    """A request that pins nothing is bound to a version as late as to a worker."""
    async with (
        broker_client_of(nats_url, model_with_versions("1", **FOUR)) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        request = await c.send()
        await eventually(c.report)
        await c.registry.add_model(model_with_versions("2", "1", **FOUR))
        async with running(gpu_worker.service, worker_settings(nats_url, model=("mock@2",))):
            await eventually(lambda: c.terminal(request))
            assert c.records[request][0]["version"] == "2"


async def test_a_new_version_without_workers_leaves_the_work_to_those_of_the_old_one(
    nats_url: str,
) -> None:
    """It may take minutes to load, or never be; a pin is a pin."""
    async with (
        broker_client_of(nats_url, model_with_versions("1", **FOUR)) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=("mock@1",))),
    ):
        await eventually(c.report)
        await c.registry.add_model(model_with_versions("2", "1", **FOUR))
        pinned, served = await c.send(version="2"), await c.send()
        await eventually(lambda: c.terminal(served))
        assert c.records[served][0]["version"] == "1"
        assert pinned not in c.records
        async with running(gpu_worker.service, worker_settings(nats_url, model=("mock@2",))):
            await eventually(lambda: c.terminal(pinned))
            later = await c.send()
            await eventually(lambda: c.terminal(later))
            assert c.records[later][0]["version"] == "2"


async def test_a_version_with_other_tokens_leaves_what_waits_to_the_old_one(nats_url: str) -> None:
    """To the new version the tokens would be another text; what is not pinned comes in order."""
    old = model_with_versions("1", **FOUR)
    async with (
        broker_client_of(nats_url, old) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url, model=("mock@2",))),
    ):
        requests = [await c.send(tokenized_for="1") for _ in range(3)]
        await eventually(c.report)
        new = make_version("2", options=FOUR, vocab_size=300)
        update = {"versions": {**old.versions, "2": new}, "default_version": "2"}
        await c.registry.add_model(old.model_copy(update=update))
        later = await c.send(tokenized_for="2")
        await eventually(lambda: c.terminal(later))
        assert not any(request in c.records for request in requests)
        async with running(gpu_worker.service, worker_settings(nats_url, model=("mock@1",))):
            await eventually(lambda: all(map(c.terminal, requests)))
        assert {c.records[request][0]["version"] for request in requests} == {"1"}
        assert c.records[later][0]["version"] == "2"


async def test_requests_cancelled_at_any_time_end_once_and_free_their_room(
    nats_url: str,
) -> None:
    """In the queue, on the way, before and while they run; then all of the room is there again."""
    async with (
        broker_client(nats_url, ttft_ms=2, itl_ms=2, sequences=32) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        requests = [await c.send(tenant=f"t{i % 9}", max_tokens=4000) for i in range(400)]
        chance = random.Random(7)

        async def cancelled() -> bool:
            """As gateways do: each is asked for again until it has worked."""
            left = [request for request in requests if not c.terminal(request)]
            for request in chance.sample(left, min(30, len(left))):
                await c.cancel(request)
            return not left

        await eventually(cancelled)
        assert any(c.tokens(request) for request in requests)
        assert not all(c.attempts(request) for request in requests)
        ends = Counter(
            c.record_counts(request)["done"] + c.record_counts(request)["error"]
            for request in requests
        )
        assert ends == {1: 400}
        await eventually(c.is_idle)

        async def all_free() -> bool:
            report = await c.report()
            if report is None or report["lanes"]:
                return False
            return bool(report["workers"][0]["free_sequences"] == 32)

        await eventually(all_free)
        assert await c.ledger_counts() == dict.fromkeys(requests, 1)


async def test_a_tenant_cannot_cancel_anothers_request(nats_url: str) -> None:
    """Between tenants nothing leaks, not even to one that has learned a request's id."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=5, sequences=1) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        running_, *queued = [await c.send(max_tokens=60) for _ in range(6)]
        await eventually(lambda: c.attempts(running_))
        c.tenants = dict.fromkeys(c.tenants, "mallory")
        await asyncio.gather(*(c.cancel(request) for request in [running_, *queued]))
        await eventually(lambda: all(c.terminal(request) for request in [running_, *queued]))
        assert all(c.tokens(request) for request in [running_, *queued])

"""A dispatcher dies, freezes, or is not there yet: nothing is lost and nothing is done twice."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from dispatcher.leader_assignment import assign_models
from dispatcher.reconcile.checkpoint import Checkpoint
from registry.models import mock_model
from streams import messages, subjects, topology
from streams.coordination.lease_bucket import STREAM, key_subject
from streams.headers import MESSAGE_ID
from streams.subjects import PoolKey, Priority
from tests.support.eventually import eventually
from tests.support.service_process import ServiceProcess, service_process
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

LEADER = assign_models({"mock"}, {"a", "b"})["mock"]
STANDBY = "b" if LEADER == "a" else "a"
QUICK = {"ttft_ms": 1, "itl_ms": 1}


def ended_once(c: BrokerClient, requests: list[str]) -> bool:
    """Each has one attempt, which was the first, and one terminal, the last record."""
    return all(
        c.attempts(request) == [1] and c.record_counts(request)["done"] == 1 and c.terminal(request)
        for request in requests
    )


async def test_a_request_queued_while_nobody_dispatches_is_served_later(nats_url: str) -> None:
    """It was accepted: durable means that it waits for whoever comes."""
    async with broker_client(nats_url, **QUICK) as c:
        requests = [await c.send(tenant=f"t{i}") for i in range(5)]
        async with (
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url)),
        ):
            await eventually(lambda: ended_once(c, requests))
            await eventually(c.is_idle)


async def test_a_standby_takes_over_from_a_leader_that_renews_no_more(nats_url: str) -> None:
    """The old leader steps down by its own clock, before the lease is free for another."""
    async with broker_client(nats_url, lease_seconds=3, **QUICK) as c:
        async with running(dispatcher.service, dispatcher_settings(nats_url, id=LEADER)):
            await eventually(c.report)
            names = ("lease", "members")
            renewing = [task for task in asyncio.all_tasks() if task.get_name() in names]
            async with (
                running(dispatcher.service, dispatcher_settings(nats_url, id=STANDBY)),
                running(gpu_worker.service, worker_settings(nats_url)),
            ):
                before = await c.send()
                await eventually(lambda: ended_once(c, [before]))
                leader = await index(c)
                for task in renewing:
                    task.cancel()

                async def taken_over() -> bool:
                    return await index(c) != leader

                await eventually(taken_over)
                after = await c.send()
                await eventually(lambda: ended_once(c, [after]))


async def index(c: BrokerClient) -> list[str]:
    """The index consumers: one, of the leader."""
    consumers = await c.broker.js.consumers_info(topology.REQUESTS)
    return [consumer.name for consumer in consumers]


async def test_a_frozen_leader_wakes_up_to_find_another_and_doubles_nothing(
    nats_url: str, tmp_path: Path
) -> None:
    """Eight hundred requests of twenty tenants are queued, some in flight, when it freezes."""
    async with broker_client(nats_url, lease_seconds=3, ttft_ms=1, itl_ms=1, sequences=64) as c:
        requests = [await c.send(tenant=f"t{i % 20}", max_tokens=2) for i in range(800)]
        settings: dict[str, Any] = {"nats_url": nats_url}
        with service_process("dispatcher", log=tmp_path / "1", id=LEADER, **settings) as leader:
            await eventually(lambda: leader.has_logged("leading"))
            with service_process(
                "dispatcher", log=tmp_path / "2", id=STANDBY, **settings
            ) as standby:
                await eventually(lambda: standby.has_logged("members_changed"))
                async with running(gpu_worker.service, worker_settings(nats_url)):
                    await eventually(lambda: any(c.attempts(request) for request in requests))
                    leader.freeze()
                    await eventually(lambda: standby.has_logged("leading"))
                    leader.thaw()
                    requests += [await c.send(tenant=f"t{i}", max_tokens=2) for i in range(50)]
                    await eventually(lambda: ended_once(c, requests))
                    await eventually(lambda: leader.has_logged("lease_lost"))
                    await eventually(c.is_idle)
        assert await c.ledger_counts() == dict.fromkeys(requests, 1)


@pytest.mark.parametrize("end", [ServiceProcess.kill, ServiceProcess.freeze])
async def test_the_default_lease_lets_a_standby_lead_within_three_seconds(
    nats_url: str, tmp_path: Path, end: Callable[[ServiceProcess], None]
) -> None:
    """As long as a new request may wait for it, and what was queued before."""
    async with broker_client(nats_url, **QUICK) as c:
        with service_process("dispatcher", nats_url, tmp_path / "1", id=LEADER) as leader:
            await eventually(lambda: leader.has_logged("leading"))
            with service_process("dispatcher", nats_url, tmp_path / "2", id=STANDBY) as standby:
                await eventually(lambda: standby.has_logged("members_changed"))
                queued = [await c.send(tenant=f"t{i}") for i in range(100)]
                end(leader)
                await eventually(lambda: standby.has_logged("leading"), seconds=3)
                async with running(gpu_worker.service, worker_settings(nats_url)):
                    await eventually(lambda: ended_once(c, queued))


async def test_a_new_leader_knows_what_is_in_flight(nats_url: str) -> None:
    """It would send too much to the workers otherwise, and forget what tenants have had."""
    async with (
        broker_client(nats_url, ttft_ms=1, itl_ms=5, sequences=4) as c,
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        async with running(dispatcher.service, dispatcher_settings(nats_url)):
            requests = [await c.send(max_tokens=400) for _ in range(10)]
            await eventually(lambda: sum(bool(c.attempts(request)) for request in requests) == 4)
        async with running(dispatcher.service, dispatcher_settings(nats_url)):
            report = await eventually(c.report)
            (lane,) = report["lanes"]
            assert lane["in_flight"] in range(4, 9)
            await eventually(lambda: ended_once(c, requests))
            await eventually(c.is_idle)


async def test_a_new_leader_has_the_counters_of_the_one_that_died(
    nats_url: str, tmp_path: Path
) -> None:
    """Who has had much waits behind who has had little, whoever leads."""
    async with (
        broker_client(nats_url, lease_seconds=3, **QUICK) as c,
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        settings: dict[str, Any] = {"nats_url": nats_url}
        with service_process("dispatcher", log=tmp_path / "1", id=LEADER, **settings) as leader:
            # First the one with little: who comes later begins where the others are
            await served(c, {"little": 2, "much": 20})
            await eventually(lambda: kept(c))
            await served(c, {"much": 5})  # after the checkpoint
            before = [await counter(c, tenant) for tenant in ("much", "little")]
            leader.kill()
        assert before[0] > 5 * before[1] > 0
        async with running(dispatcher.service, dispatcher_settings(nats_url, id=STANDBY)):
            await eventually(c.report)
            after = [await counter(c, tenant) for tenant in ("much", "little")]
    assert after == pytest.approx(before, rel=0.1)


async def test_a_checkpoint_of_another_release_keeps_nobody_from_leading(nats_url: str) -> None:
    """Then the tenants begin alike, which is what they did before there were any."""
    async with broker_client(nats_url, **QUICK) as c:
        await c.broker.store(subjects.checkpoint("mock"), messages.pack((1.0, 0, {"a": (1.0,)})))
        request = await c.send()
        async with (
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url)),
        ):
            await eventually(lambda: ended_once(c, [request]))


async def served(c: BrokerClient, numbers: dict[str, int]) -> None:
    """So many requests of each tenant are sent, and have ended."""
    sent = [await c.send(tenant=tenant) for tenant, n in numbers.items() for _ in range(n)]
    await eventually(lambda: ended_once(c, sent))
    await eventually(c.is_idle)


async def kept(c: BrokerClient) -> bool:
    """The leader has left a checkpoint of two tenants."""
    found = await c.broker.read(topology.CHECKPOINTS, {"last_by_subj": subjects.checkpoint("mock")})
    return bool(found) and len(Checkpoint.unpack(found[0].data).tenants) == 2


async def counter(c: BrokerClient, tenant: str) -> float:
    """What `millstream why --tenant` shows."""
    asked = json.dumps({"tenant": tenant}).encode()
    answer = await c.broker.request(subjects.report("mock"), asked)
    assert answer
    return float(json.loads(answer)["counter"])


async def dispatched_by_hand(c: BrokerClient, request: str) -> None:
    """What a dispatcher does that dies before it acknowledges."""
    (message,) = await c.broker.read_subject(topology.REQUESTS, subjects.ALL_REQUESTS)
    headers = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
    subject = subjects.work(PoolKey("mock", "1", Priority.STANDARD))
    await c.broker.store(subject, message.data, headers | {MESSAGE_ID: request})


async def test_a_dispatcher_that_died_before_its_acknowledgement_doubles_nothing(
    nats_url: str,
) -> None:
    """Its successor finds the request in REQUESTS and in WORK, and runs it once."""
    async with broker_client(nats_url, **QUICK) as c:
        request = await c.send()
        await dispatched_by_hand(c, request)
        async with (
            running(dispatcher.service, dispatcher_settings(nats_url)),
            running(gpu_worker.service, worker_settings(nats_url)),
        ):
            await eventually(c.is_idle)
            assert ended_once(c, [request])
            assert await c.ledger_counts() == {request: 1}


async def test_a_request_that_has_ended_meanwhile_is_not_run_again(nats_url: str) -> None:
    """The broker remembers the message id for longer than any request may live."""
    async with broker_client(nats_url, **QUICK) as c:
        request = await c.send()
        await dispatched_by_hand(c, request)
        async with running(gpu_worker.service, worker_settings(nats_url)):
            await eventually(lambda: ended_once(c, [request]))
            async with running(dispatcher.service, dispatcher_settings(nats_url)):
                await eventually(c.is_idle)

                async def nothing_in_flight() -> bool:
                    report = await c.report()
                    return report is not None and report["lanes"] == []

                await eventually(nothing_in_flight)
        assert ended_once(c, [request])


async def test_what_is_queued_for_a_model_that_was_removed_ends_with_an_error(
    nats_url: str,
) -> None:
    """Nobody would look after its requests otherwise, not even at their deadline."""
    async with broker_client(nats_url) as c:
        request = await c.send()
        await c.registry.remove("mock")
        async with running(dispatcher.service, dispatcher_settings(nats_url)):
            terminal = await eventually(lambda: c.terminal(request))
            assert terminal["code"] == "model_not_found"
            await eventually(c.is_idle)


async def holders(c: BrokerClient) -> Counter[str]:
    """How many models each dispatcher leads."""
    leases = await c.broker.read_subject(STREAM, key_subject("*"))
    of_models = (each for each in leases if each.data and each.subject != key_subject("admin"))
    return Counter(lease.data.decode().partition(".")[0] for lease in of_models)


async def test_models_are_led_by_whoever_is_there(nats_url: str, tmp_path: Path) -> None:
    """Two share them, and what one led is the other's within the lease when it dies."""
    async with broker_client(nats_url, lease_seconds=3, **QUICK) as c:
        for number in range(5):
            await c.registry.add_model(mock_model(f"model-{number}"))

        async def are(**wanted: int) -> bool:
            return await holders(c) == wanted

        with service_process(
            "dispatcher", nats_url, tmp_path / "a.log", id="a", lease_seconds=3
        ) as first:
            await eventually(c.report)  # there are leases
            await eventually(lambda: are(a=6))
            with service_process(
                "dispatcher", nats_url, tmp_path / "b.log", id="b", lease_seconds=3
            ):
                await eventually(lambda: are(a=3, b=3))
                first.kill()
                await eventually(lambda: are(b=6))

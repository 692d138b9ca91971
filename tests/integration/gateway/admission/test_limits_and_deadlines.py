"""Overload and deadlines: refused early, with a reason, and never at another tenant's cost."""

import asyncio

import dispatcher.service
from tests.support.gateways import OTHER_KEY, RunningGateway, cell, gateways, register, tenants
from tests.support.services import dispatcher_settings, running

LIMIT = 3


async def fill(gateway: RunningGateway, key: str, count: int) -> list[str]:
    """The types, or codes, that so many requests are answered with when nobody serves them."""
    async with gateway.socket(key=key) as socket:
        for i in range(count):
            await socket.generate(str(i))
        frames = [await socket.receive() for _ in range(count)]
        return sorted(frame.get("code", frame["type"]) for frame in frames)


async def test_a_full_lane_is_a_429_and_another_tenant_is_unaffected(nats_url: str) -> None:
    """For a tenant at the stream's own limit, and for one below it, exactly at its limit."""
    await register(nats_url)
    limits = tenants(max_queued=LIMIT)
    limits["other"] = limits["other"].model_copy(update={"max_queued": 2 * LIMIT})
    async with gateways(nats_url, 2, tenants=limits) as (first, second):
        assert await fill(first, "sk-acme", LIMIT + 2) == ["accepted"] * LIMIT + ["queue_full"] * 2
        answer = await second.complete()
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.error["type"] == "rate_limit_error"
        most = ["accepted"] * 2 * LIMIT
        assert await fill(second, OTHER_KEY, 2 * LIMIT + 2) == [*most, "queue_full", "queue_full"]


async def test_lanes_of_one_tenant_are_separate(nats_url: str) -> None:
    """A backlog of batch work does not lock out the same tenant's interactive requests."""
    await register(nats_url)
    async with gateways(nats_url, tenants=tenants(max_queued=1)) as (gateway,):
        async with gateway.socket() as socket:
            types = []
            for i, priority in enumerate(("batch", "interactive", "standard", "batch")):
                await socket.generate(str(i), priority=priority)
                types.append((await socket.receive())["type"])
            assert types == ["accepted"] * 3 + ["error"]


async def test_a_deadline_that_passes_in_the_queue_is_a_504(nats_url: str) -> None:
    """Nobody serves; the dispatcher ends it, and the client learns it with the right status."""
    await register(nats_url)
    async with (
        gateways(nats_url) as (gateway,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        gateway.socket() as socket,
    ):
        await socket.generate("a", deadline_ms=200)
        whole, streamed = await asyncio.gather(
            gateway.complete(deadline_ms=200), gateway.complete(deadline_ms=200, stream=True)
        )
        assert (whole.status, whole.error["code"]) == (504, "deadline_exceeded")
        assert (streamed.status, streamed.error["code"]) == (504, "deadline_exceeded")
        assert (await socket.receive_rest("a"))[-1]["code"] == "deadline_exceeded"


async def test_a_deadline_that_passes_while_running_keeps_what_was_said(nats_url: str) -> None:
    """The headers of a stream are sent by then: the error is its last event."""
    async with cell(nats_url, mock={"ttft_ms": 1, "itl_ms": 5}) as (gateway,):
        whole, streamed = await asyncio.gather(
            gateway.complete(max_tokens=4000, deadline_ms=3000),
            gateway.complete(max_tokens=4000, deadline_ms=3000, stream=True),
        )
        assert (whole.status, whole.error["code"]) == (504, "deadline_exceeded")
        assert streamed.status == 200
        *said, last = streamed.events
        assert last["error"]["code"] == "deadline_exceeded"
        assert any(event["choices"][0]["text"] for event in said)

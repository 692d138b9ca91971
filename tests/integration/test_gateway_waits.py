"""What gateways do with a dispatcher's news of its waits, at every door."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streams import subjects
from streams.connection import Broker, connect
from streams.messages import Pressure
from tests.eventually import eventually
from tests.integration.gateways import OTHER_KEY, Answer, Gateway, gateways, register


@asynccontextmanager
async def told(nats_url: str) -> AsyncIterator[tuple[Gateway, Broker]]:
    await register(nats_url)
    async with gateways(nats_url) as (gateway,), connect(nats_url, "test") as broker:
        yield gateway, broker


async def refused(gateway: Gateway, broker: Broker, pressure: Pressure) -> Answer:
    """The first answer that is a refusal, told again and again as a dispatcher would."""

    async def ask() -> Answer | None:
        await broker.publish(subjects.pressure("mock"), pressure.pack())
        answer = await gateway.complete(deadline_ms=100)
        return answer if answer.status != 504 else None

    return await eventually(ask)


def pressure(alone: float, own: float, workers: int = 1, unmanned: float = 0.0) -> Pressure:
    waits: dict[str, float | None] = {"standard": alone}
    tenants = {"acme": {"standard": own}}
    return Pressure("mock", workers, {}, waits, tenants, 0.01, unmanned_seconds=unmanned)


async def test_an_overloaded_model_is_a_503_with_the_estimate(nats_url: str) -> None:
    """In OpenAI's shape over HTTP, as a frame over WebSocket."""
    async with told(nats_url) as (gateway, broker):
        answer = await refused(gateway, broker, pressure(50.0, 50.0))
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert answer.error["estimated_wait_ms"] == 50_000
        assert int(answer.headers["retry-after"]) >= 49
        async with gateway.socket() as socket:
            await broker.publish(subjects.pressure("mock"), pressure(50.0, 50.0).pack())
            await socket.generate("a", deadline_ms=100)
            frame = await socket.receive()
            assert (frame["code"], frame["estimated_wait_ms"]) == ("overloaded", 50_000)
            assert frame["retry_after_ms"] > 49_000


async def test_a_tenants_own_backlog_is_a_429(nats_url: str) -> None:
    """Another tenant is let in at the same time."""
    async with told(nats_url) as (gateway, broker):
        news = pressure(0.0, 50.0)
        answer = await refused(gateway, broker, news)
        assert (answer.status, answer.error["code"]) == (429, "tenant_backlog")
        assert answer.error["type"] == "rate_limit_error"
        await broker.publish(subjects.pressure("mock"), news.pack())
        async with gateway.socket(key=OTHER_KEY) as socket:
            await socket.generate("a", deadline_ms=100)
            assert (await socket.receive())["type"] == "accepted"


async def test_a_model_that_nobody_serves_is_a_503(nats_url: str) -> None:
    """At once, with its own code, and not after the deadline."""
    async with told(nats_url) as (gateway, broker):
        news = pressure(0.0, 0.0, workers=0, unmanned=60.0)
        answer = await refused(gateway, broker, news)
        assert (answer.status, answer.error["code"]) == (503, "no_workers")
        assert answer.headers["retry-after"] == "10"

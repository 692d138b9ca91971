"""What gateways do with a dispatcher's news of its waits, at every door."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.admission import load_shedding
from streams import subjects
from streams.messages import Pressure
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import OTHER_KEY, RunningGateway, gateways, register


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """News are told once here, and trusted for the whole of a test."""
    monkeypatch.setattr(load_shedding, "MAX_PRESSURE_AGE_SECONDS", 600.0)


@asynccontextmanager
async def told(
    nats_url: str, news: Pressure
) -> AsyncIterator[tuple[RunningGateway, dict[str, Any]]]:
    """A gateway that has heard the news, and the frame with which it refused because of them."""
    await register(nats_url)
    async with gateways(nats_url) as (gateway,), connect(nats_url, "test") as broker:
        await broker.publish(subjects.pressure("mock"), news.pack())
        async with gateway.socket() as socket:
            ids = map(str, itertools.count())

            async def refusal() -> dict[str, Any] | None:
                await socket.generate(next(ids), deadline_ms=100)
                frame = await socket.receive()
                return frame if frame["type"] == "error" else None

            yield gateway, await eventually(refusal)


def pressure(alone: float, own: float, workers: int = 1, unmanned: float = 0.0) -> Pressure:
    wait: dict[str, float | None] = {"standard": alone}
    tenants = {"acme": {"standard": own}}
    return Pressure("mock", workers, {}, wait, tenants, 0.01, unmanned_seconds=unmanned)


async def test_an_overloaded_model_is_a_503_with_the_estimate(nats_url: str) -> None:
    """In OpenAI's shape over HTTP, as a frame over WebSocket."""
    async with told(nats_url, pressure(50.0, 50.0)) as (gateway, frame):
        assert (frame["code"], frame["estimated_wait_ms"]) == ("overloaded", 50_000)
        assert frame["retry_after_ms"] > 49_000
        answer = await gateway.complete(deadline_ms=100)
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert answer.error["estimated_wait_ms"] == 50_000
        assert int(answer.headers["retry-after"]) >= 49


async def test_a_tenants_own_backlog_is_a_429(nats_url: str) -> None:
    """Another tenant is let in at the same time."""
    async with told(nats_url, pressure(0.0, 50.0)) as (gateway, frame):
        assert frame["code"] == "tenant_backlog"
        answer = await gateway.complete(deadline_ms=100)
        assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
        async with gateway.socket(key=OTHER_KEY) as socket:
            await socket.generate("a", deadline_ms=100)
            assert (await socket.receive())["type"] == "accepted"


async def test_a_model_that_nobody_serves_is_a_503(nats_url: str) -> None:
    """At once, with its own code, and not after the deadline."""
    async with told(nats_url, pressure(0.0, 0.0, workers=0, unmanned=60.0)) as (gateway, frame):
        assert (frame["code"], frame["retry_after_ms"]) == ("no_workers", 10_000)
        answer = await gateway.complete(deadline_ms=100)
        assert (answer.status, answer.error["code"]) == (503, "no_workers")
        assert answer.headers["retry-after"] == "10"

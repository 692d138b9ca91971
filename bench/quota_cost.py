"""Measures the cost of quotas at the gateway: single reservations, beside a stored message."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median

from api.submission.quota_checks import RequestAmounts
from api.submission.quotas import Quotas
from bench import reporting
from bench.reporting import Figure, Run
from registry.tenant_records import ApiKey, Tenant
from streams.broker import declaration
from streams.broker.broker_client import Broker, connect
from streams.topology import Scale
from streams.usage_accounts import Price
from tests.support.nats_server import NatsServer

RESERVATIONS = 500
MINUTE = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9}
ALL = {**MINUTE, "max_concurrent": 10**6, "tokens_per_day": 10**12, "spend_per_day": 1e9}
TENANTS = {
    "none_ms": Tenant(name="none"),
    "two_ms": Tenant.model_validate({"name": "two", **MINUTE}),
    "five_ms": Tenant.model_validate({"name": "five", **ALL}),
    "ten_ms": Tenant.model_validate({"name": "ten", **ALL}).model_copy(
        update={"key": ApiKey.model_validate({"tenant": "ten", "name": "key", **ALL})}
    ),
}
FIGURES = (
    Figure("store_ms", "one stored message, p50, ms"),
    Figure("none_ms", "reservation of a tenant without quotas, p50, ms"),
    Figure("two_ms", "reservation of a tenant with two quotas, p50, ms"),
    Figure("five_ms", "reservation of a tenant with five quotas, p50, ms"),
    Figure("ten_ms", "reservation of a tenant and its key with five quotas each, p50, ms"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, each on a fresh nats-server, and publish; `seconds` has no effect."""
    found = [asyncio.run(_run()) for _ in range(runs)]
    reporting.publish("quotas", {"reservations": RESERVATIONS}, FIGURES, found)


async def _run() -> Run:
    with tempfile.TemporaryDirectory() as store:
        server = NatsServer(Path(store))
        try:
            async with connect(server.url, "bench") as broker:
                await declaration.declare(broker, Scale(), 1000)
                return await _measured(broker)
        finally:
            server.kill()


async def _measured(broker: Broker) -> Run:
    quotas = Quotas(broker)
    running = asyncio.create_task(quotas.run())
    amounts = RequestAmounts(100, 100, Price(1, 1))

    async def store(number: int) -> None:
        await broker.store("infer.dead.bench.mock", b"")

    async def reserve(tenant: Tenant, number: int) -> None:
        await quotas.reserve(tenant, "mock", f"{tenant.name}-{number}", amounts, 600)

    found = {"store_ms": await _median_ms(store)}
    for name, tenant in TENANTS.items():
        found[name] = await _median_ms(partial(reserve, tenant))
    running.cancel()
    return found


async def _median_ms(act: Callable[[int], Awaitable[None]]) -> float:
    """The median duration of `act` in milliseconds."""
    durations = []
    for number in range(RESERVATIONS):
        began = time.perf_counter()
        await act(number)
        durations.append((time.perf_counter() - began) * 1000)
    return median(durations)

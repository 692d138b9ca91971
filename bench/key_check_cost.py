"""Measures what checking a managed key at every frame costs a gateway, in CPU time."""

import asyncio
import tempfile
import time
from pathlib import Path

from api.authentication.authenticator import Authenticator, ClientOrigin, Principal
from bench import reporting
from bench.pipeline_cost import TOKENS
from bench.reporting import Figure, Run
from registry.tenant_records import Tenant
from registry.tenants import Tenants
from streams.broker.broker_client import connect
from tests.support.keys import PEPPER, operator
from tests.support.nats_server import NatsServer
from tests.support.services import always

CHECKS = 200_000
CHECKS_OF_REQUEST = 2  # when its frame has come, and before it is queued
FIGURES = (
    Figure("check_us", "µs of CPU for a check"),
    Figure("us_per_token", f"… for each token of a stream of {TOKENS}", "2 % of the gateway's"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, and publish; `seconds` has no effect."""
    found = [asyncio.run(_run()) for _ in range(runs)]
    reporting.publish("key-checks", {"checks": CHECKS}, FIGURES, found)


async def _run() -> Run:
    with tempfile.TemporaryDirectory() as store:
        server = NatsServer(Path(store))
        try:
            check_us = _measure(await _make_principal(server.url))
        finally:
            server.kill()
    return {"check_us": check_us, "us_per_token": check_us * CHECKS_OF_REQUEST / TOKENS}


async def _make_principal(nats: str) -> Principal:
    async with connect(nats, "bench") as broker, operator(nats) as op:
        tenants = await Tenants.open(broker, declares=always)
        await tenants.upsert(Tenant(name="acme"))
        text, _ = await op.create(networks=("127.0.0.0/8",))
        keys = Authenticator(tenants, op.keys, PEPPER, (), time.time, refuses_weak=True)
        found = await keys.authenticate(text, ClientOrigin("127.0.0.1"))
        await tenants.close()
        return found


def _measure(principal: Principal) -> float:
    began = time.process_time()
    for _ in range(CHECKS):
        principal.check("infer")
    return (time.process_time() - began) / CHECKS * 1e6

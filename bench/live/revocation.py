"""Measures when a withdrawn credential has no effect any more, at three gateways with open sockets.

A key, a tenant, or a token's subject is withdrawn by the admin API. Each time counts from its
answer to the last frame that any gateway accepts, and to the closing of each socket.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from websockets.exceptions import ConnectionClosed

from bench import reporting
from bench.reporting import Figure, Run
from millstream.admin.admin_client import HttpAdminClient
from registry.store import Registry
from streams.broker.broker_client import connect
from tests.integration.gateway.test_identity_tokens import Provider, provider
from tests.support.eventually import eventually
from tests.support.gateways import GatewaySocket, RunningGateway
from tests.support.keys import PEPPER
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess
from tests.support.services import model_with_versions

GATEWAYS, TRIALS = 3, 40
FRAME_SECONDS = 0.005  # between two requests on a socket
KINDS = ("key", "tenant", "token")
ADMIN_KEY = "sk-admin-of-the-measure"
FIGURES = tuple(
    figure
    for kind in KINDS
    for figure in (
        Figure(f"{kind}_accepted_p99_ms", f"{kind}: the last accepted frame, p99, ms", "≤ 100"),
        Figure(f"{kind}_closed_p50_ms", f"{kind}: a socket is closed, p50, ms"),
        Figure(f"{kind}_closed_p99_ms", f"{kind}: a socket is closed, p99, ms", "≤ 100"),
    )
)


@dataclass
class Cell:
    """Three gateways, the admin API, and the identity provider."""

    gateways: list[RunningGateway]
    admin: HttpAdminClient
    provider: Provider


@dataclass
class Times:
    """Milliseconds from a withdrawal to its effect, at each socket of each trial."""

    accepted: list[float] = field(default_factory=list)
    closed: list[float] = field(default_factory=list)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, each on a fresh system, and publish; `seconds` has no effect."""
    found = [asyncio.run(_run()) for _ in range(runs)]
    setting = {"gateways": GATEWAYS, "trials": TRIALS, "frames_apart_seconds": FRAME_SECONDS}
    reporting.publish("revocation", setting, FIGURES, found)


async def _run() -> Run:
    result: dict[str, float] = {}
    async with _cell() as cell:
        for kind in KINDS:
            times = Times()
            for number in range(TRIALS):
                await _withdraw(cell, kind, number, times)
            result[f"{kind}_accepted_p99_ms"] = _percentile(times.accepted, 0.99)
            result[f"{kind}_closed_p50_ms"] = _percentile(times.closed, 0.5)
            result[f"{kind}_closed_p99_ms"] = _percentile(times.closed, 0.99)
    return result


async def _withdraw(cell: Cell, kind: str, number: int, times: Times) -> None:
    """Open sockets with a credential, withdraw it, and wait until all of them are closed."""
    credential, withdraw, restore = await _make_credential(cell, kind, number)
    for gateway in cell.gateways:
        await eventually(lambda g=gateway: _is_known(g, credential))  # type: ignore[misc]
    async with AsyncExitStack() as stack:
        sockets = [
            await stack.enter_async_context(gateway.socket(key=credential))
            for gateway in cell.gateways
        ]
        using = [asyncio.create_task(_use(socket)) for socket in sockets]
        await asyncio.sleep(20 * FRAME_SECONDS)
        await withdraw()
        at = time.monotonic()
        for last_accepted, closed in await asyncio.gather(*using):
            times.accepted.append(max(0.0, last_accepted - at) * 1000)
            times.closed.append(max(0.0, closed - at) * 1000)
    await restore()


async def _make_credential(
    cell: Cell, kind: str, number: int
) -> tuple[str, Callable[[], Awaitable[object]], Callable[[], Awaitable[object]]]:
    """A credential, what withdraws it, and what is to be done before the next one."""
    call = cell.admin.call

    async def nothing() -> None:
        pass

    if kind == "token":
        token = await cell.provider.token("ada")
        denial = {"issuer": cell.provider.issuer, "subject": "ada"}
        withdrawn: list[str] = []

        async def deny() -> None:
            withdrawn.append((await call("denials.add", **denial))["id"])

        return token, deny, lambda: call("denials.remove", id=withdrawn[0])
    tenant = f"tenant-{number}" if kind == "tenant" else "acme"
    if kind == "tenant":
        await call("tenants.add", name=tenant)
    made = await call("keys.create", tenant=tenant, name="bench")
    if kind == "tenant":
        return made["key"], lambda: call("tenants.remove", name=tenant), nothing
    return made["key"], lambda: call("keys.revoke", id=made["id"]), nothing


async def _is_known(gateway: RunningGateway, credential: str) -> bool:
    return (await gateway.request("GET", "/v1/models", key=credential)).status == 200


async def _use(socket: GatewaySocket) -> tuple[float, float]:
    """Send requests until the socket is closed; when the last was accepted, and when it closed."""
    accepted = 0.0
    sending = asyncio.create_task(_send(socket))
    with suppress(ConnectionClosed):
        while True:
            frame = await socket.receive()
            if frame["type"] == "accepted":
                accepted = time.monotonic()
    closed = time.monotonic()
    sending.cancel()
    return accepted, closed


async def _send(socket: GatewaySocket) -> None:
    number = 0
    with suppress(ConnectionClosed):
        while True:
            await socket.generate(str(number), max_tokens=1)
            number += 1
            await asyncio.sleep(FRAME_SECONDS)


@asynccontextmanager
async def _cell() -> AsyncIterator[Cell]:
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (home / "nats").mkdir()
        server = NatsServer(home / "nats")
        stack.callback(server.kill)
        found = await stack.enter_async_context(provider())
        ports, admin_port = [free_port() for _ in range(GATEWAYS)], free_port()
        for name, settings in _services(home, found, ports, admin_port):
            log = home / f"{name}.log"
            told = {"nats": server.url, **settings}
            service = ServiceProcess(name.partition("-")[0], log, told)
            stack.callback(service.kill)
        async with connect(server.url, "bench") as broker:
            registry = await Registry.open(broker, seconds=60)
            await registry.add_model(model_with_versions("1", ttft_ms=1, itl_ms=1))
            await registry.close()
        gateways = [RunningGateway(port, asyncio.Event()) for port in ports]
        for gateway in gateways:
            await eventually(gateway.is_ready)
        yield Cell(gateways, HttpAdminClient(f"http://127.0.0.1:{admin_port}", ADMIN_KEY), found)


def _services(
    home: Path, found: Provider, ports: list[int], admin_port: int
) -> list[tuple[str, dict[str, object]]]:
    """The name and settings of each process."""
    pepper, config = home / "key-pepper", home / "millstream.toml"
    pepper.write_bytes(PEPPER.secret)
    config.write_text(
        "[tenants.acme]\n"
        f'[oidc.corp]\nissuer = "{found.issuer}"\naudience = "millstream"\ntoken_type = "JWT"\n'
        'tenant_claim = "org"\ntenants = { "org-17" = "acme" }\nscope_claim = "permissions"\n'
        'scopes = { "llm" = ["infer", "models:read"] }\n'
    )
    shared = {"key_pepper_file": pepper, "config": config}
    return [
        ("admin", {**shared, "admin_port": admin_port, "admin_key": ADMIN_KEY}),
        *((f"gateway-{number}", {**shared, "port": port}) for number, port in enumerate(ports)),
        ("dispatcher", {}),
        ("worker", {"model": json.dumps(["mock"])}),
    ]


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]

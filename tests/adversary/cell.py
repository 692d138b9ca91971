"""A cell that runs: all services with users of their own, two models, and its tenants."""

import asyncio
import shutil
import traceback
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import nats.errors
from nats.js.api import StreamConfig
from pydantic import SecretStr

import admin.service
import dispatcher.service
import gateway.service
import gpu_worker.service
import jobs.service
from admin.settings import AdminSettings
from dispatcher.settings import DispatcherSettings
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from jobs.settings import JobsSettings
from millstream.admin.admin_client import AdminRefused, AdminUnreachable, HttpAdminClient
from registry.models import MOCK_VERSION, mock_model
from streams.accounts.access import UserClass
from streams.accounts.credentials_file import UserCredentials
from streams.accounts.rights import Pins
from streams.base_settings import ServiceSettings, TenantSettings
from streams.broker.account_claims import push_claims
from tests.support.accounts_cell import AccountsCell, admin_api
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway
from tests.support.ports import free_port
from tests.support.services import running

ADMIN_KEY = "sk-admin-d41d8cd98f00b204e9800998ecf8427e"
# Tenants: a victim over HTTP, a victim over NATS, and the adversary. No other word has these names
# in it.
NORTHWIND, TAILSPIN, MALLORY = "northwind", "tailspin", "mallory"
KEYS = {
    NORTHWIND: "sk-northwind-3f0c9a4b8d17e65f20bb1c6d",
    TAILSPIN: "sk-tailspin-91ae77c0d25b40fe8a6613f2",
    MALLORY: "sk-mallory-c7730be1f4d94a0592fe18aa",
}
MODEL, SECOND = "mock", "second"  # the first one's worker is w1, the second one's is w2
STOLEN = "w3"  # a user of a worker of the second model, whose credentials are stolen
LOOPBACK = IPv4Network("127.0.0.0/8")  # where endpoints of webhooks may be
START_SECONDS = 240.0  # three servers elect leaders of twenty streams
MOCK_SPEED = {"ttft_ms": 5, "itl_ms": 3}


def pinned(worker: str, model: str) -> Pins:
    """Pins of the user of a worker with one model."""
    return Pins(id=worker, pools=((model, MOCK_VERSION),))


@dataclass
class RunningCell:
    """A cell with all services; `admin_port` and `metrics_port` are on loopback."""

    broker: AccountsCell
    gateways: list[RunningGateway] = field(default_factory=list)
    admin_port: int = 0
    metrics_port: int = 0
    ended: list[str] = field(default_factory=list)  # services that have ended, and by which error

    def tenant_user(self, tenant: str) -> UserCredentials:
        """Credentials of a user of a tenant that publishes to NATS."""
        return self.broker.directory.tenant_credentials(tenant)

    def url(self, number: int) -> str:
        """The address of some server: each service has another one, as far as there are so many."""
        return self.broker.nodes[number % len(self.broker.nodes)].url

    def creds(self, user_class: UserClass, name: str, pins: Pins | None = None) -> Path:
        """The credentials file of a process."""
        return self.broker.directory.add_user(name, user_class, pins)


@asynccontextmanager
async def running_cell(home: Path, nodes: int) -> AsyncIterator[RunningCell]:
    """A cell on one server or on three that serves both models; its store is under `home`."""
    broker = AccountsCell(home, nodes)
    try:
        broker.start()
        await eventually(lambda: broker.has_servers(nodes))
        async with AsyncExitStack() as stack:
            cell = RunningCell(broker)
            await eventually(lambda: _places_streams(broker, nodes), START_SECONDS)
            await _start_admin(stack, cell, nodes)
            await _start_services(stack, cell)
            await _let_tenants_publish(cell)
            yield cell
    finally:
        broker.close()
        shutil.rmtree(home, ignore_errors=True)


@dataclass
class _Noted:
    """A service whose end before it was told to is noted in the cell."""

    service: Any
    cell: RunningCell

    async def run(self, settings: ServiceSettings, stop: asyncio.Event) -> None:
        """As the service does."""
        try:
            await self.service.run(settings, stop)
        except BaseException as error:
            self.cell.ended.append(f"{settings.id} has ended: {traceback.format_exception(error)}")
            raise


async def _places_streams(broker: AccountsCell, replicas: int) -> bool:
    """Whether servers that know each other are ready to store, which takes them a while longer."""
    probe = StreamConfig("PROBE", subjects=["probe"], num_replicas=replicas)
    async with broker.client(UserClass.ADMIN, "probing") as client:
        for store in ("LEDGER", "WORK"):
            api = admin_api(client, store)
            try:
                await api.add_stream(probe)
                await api.delete_stream("PROBE")
            except (nats.errors.Error, TimeoutError):
                return False
    return True


async def _start_admin(stack: AsyncExitStack, cell: RunningCell, replicas: int) -> None:
    cell.admin_port = free_port()
    settings = AdminSettings(
        nats=cell.url(0),
        nats_creds=cell.creds(UserClass.ADMIN, "a1"),
        id="a1",
        admin_port=cell.admin_port,
        admin_key=SecretStr(ADMIN_KEY),
        replicas=replicas,
        tenants={name: TenantSettings(keys=(key,), publishes=True) for name, key in KEYS.items()},
    )
    await stack.enter_async_context(running(_Noted(admin.service, cell), settings))
    client = HttpAdminClient(f"http://127.0.0.1:{cell.admin_port}", ADMIN_KEY)
    for model in (MODEL, SECOND):
        await eventually(lambda model=model: _registers(client, model), START_SECONDS)  # type: ignore[misc]


async def _registers(client: HttpAdminClient, model: str) -> bool:
    """Whether the admin service has stored the model; it may still be declaring buckets."""
    record = mock_model(model, **MOCK_SPEED).model_dump(mode="json")
    try:
        await client.call("models.put", name=model, model=record)
    except AdminUnreachable:
        return False
    except AdminRefused as refusal:
        if refusal.code != "broker_unavailable":
            raise
        return False
    return True


async def _start_services(stack: AsyncExitStack, cell: RunningCell) -> None:
    cell.metrics_port = free_port()
    for number, name in enumerate(("g1", "g2")):
        settings = GatewaySettings(
            nats=cell.url(number),
            nats_creds=cell.creds(UserClass.GATEWAY, name),
            id=name,
            port=free_port(),
            metrics_port=cell.metrics_port if number == 0 else 0,
            drain_seconds=5,
            webhook_network=(LOOPBACK,),
        )
        service = _Noted(gateway.service, cell)
        stop = await stack.enter_async_context(running(service, settings))
        cell.gateways.append(RunningGateway(settings.port, stop))
    leading = DispatcherSettings(
        nats=cell.url(2), nats_creds=cell.creds(UserClass.DISPATCHER, "d1"), id="d1"
    )
    await stack.enter_async_context(running(_Noted(dispatcher.service, cell), leading))
    feeding = JobsSettings(
        nats=cell.url(1),
        nats_creds=cell.creds(UserClass.JOBS, "j1"),
        id="j1",
        webhook_network=(LOOPBACK,),
    )
    await stack.enter_async_context(running(_Noted(jobs.service, cell), feeding))
    for number, (name, model) in enumerate((("w1", MODEL), ("w2", SECOND))):
        creds = cell.creds(UserClass.WORKER, name, pinned(name, model))
        serving = WorkerSettings(nats=cell.url(number), nats_creds=creds, id=name, model=(model,))
        await stack.enter_async_context(running(_Noted(gpu_worker.service, cell), serving))
    for each in cell.gateways:
        for model in (MODEL, SECOND):
            await eventually(lambda each=each, model=model: _serves(each, model), START_SECONDS)  # type: ignore[misc]


async def _serves(gateway: RunningGateway, model: str) -> bool:
    try:
        answer = await gateway.complete(key=KEYS[NORTHWIND], model=model, max_tokens=1)
    except (OSError, EOFError):
        return False
    return answer.status == 200


async def _let_tenants_publish(cell: RunningCell) -> None:
    async with cell.broker.client(UserClass.SYSTEM) as system:
        for tenant in (TAILSPIN, MALLORY):
            await push_claims(system, cell.broker.directory.add_tenant(tenant))

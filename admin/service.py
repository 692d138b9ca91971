"""`millstream admin`: declares streams and buckets, and changes records for operators."""

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from admin.account_operations import AccountOperations
from admin.account_updates import AccountUpdates
from admin.admin_api import AdminApi
from admin.admin_keys import AdminKeys
from admin.audit_operations import AuditOperations
from admin.audit_trail import AuditTrail, acting
from admin.caller import Caller
from admin.declarer import Declarer, Records
from admin.fleet.curve_operations import CurveOperations
from admin.fleet.fleet_operations import FleetOperations
from admin.fleet.serving_operations import ServingOperations
from admin.http_api import build_app
from admin.http_server import AdminServer, listen
from admin.key_operations import KeyOperations
from admin.metrics import DECLARING
from admin.nats_api import serve_nats
from admin.operations import Handler, Operations
from admin.price_operations import PriceOperations
from admin.settings import AdminSettings
from api.authentication.authenticator import Authenticator
from api.authentication.identity_provider import IdentityProvider, open_providers
from registry.credentials.key_pepper import Pepper, read_pepper
from registry.credentials.keys import Keys
from registry.credentials.tenant_accounts import TenantAccounts
from registry.kv_records import KvRecords
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenants import Tenants
from streams import topology
from streams.accounts.cell_directory import CellDirectory
from streams.broker import declaration
from streams.broker.broker_client import Broker, connect
from streams.broker.clock_sync import sample_once
from streams.broker.declaration import WAIT_SECONDS
from streams.broker.reconnecting_client import ReconnectingClient
from streams.broker.retry import retry_forever
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import LeaseBucket
from streams.errors import MillstreamError
from streams.metrics_server import not_yet, serve_metrics
from streams.records.audit_chain import ChainHead
from streams.records.audit_log import AuditFull, AuditLog
from streams.topology import Scale

log = structlog.get_logger()

LEASE = "admin"
SYSTEM_USER = "system"  # of the directory of keys: it tells the servers of accounts
R = TypeVar("R", bound=KvRecords[Any])


class AdminKeyUnreadable(MillstreamError):
    """The file with the key of the admin API cannot be read, or is empty."""


async def run(settings: AdminSettings, stop: asyncio.Event) -> None:
    """Declare and answer operators until `stop` is set; then let another process lead at once.

    Raises `AdminAddressUnusable`, `AdminKeyUnreadable`, `PepperUnreadable`, `InvalidCellDirectory`,
    `KeyTaken` for a configured key of two tenants, and `BrokerUnavailable` if the broker does not
    answer at the start; those of the broker in an exception group.
    """
    own_keys = _read_keys(settings)
    pepper = read_pepper(settings.key_pepper_file) if settings.key_pepper_file else None
    cell = _open_cell(settings.broker_keys) if settings.broker_keys else None
    checks: dict[str, Callable[[], bool]] = {"nats": not_yet, "records": not_yet}
    async with AsyncExitStack() as stack:
        listener = listen(settings.admin_host, settings.admin_port)
        stack.callback(listener.close)
        stack.enter_context(serve_metrics(settings, checks))
        broker = await stack.enter_async_context(
            connect(settings.nats, f"admin-{settings.id}", settings.nats_files)
        )
        checks["nats"] = lambda: broker.is_connected
        bucket = LeaseBucket(broker, settings.lease_seconds, settings.replicas)
        lease = Lease(broker, LEASE, settings.id, bucket)
        stack.push_async_callback(lease.release)
        async with asyncio.TaskGroup() as tasks:
            campaign = tasks.create_task(lease.run(), name="lease")
            await lease.answered.wait()
            scale = Scale(settings.replicas, settings.shards)
            records = await _open_records(stack, broker, lease, settings)
            audit_log, trail = await _begin_audit(broker, settings, scale, records)
            await _apply_configuration(records.tenants, settings)
            declarer = Declarer(broker, lease, records, scale, settings.stream_limits)
            DECLARING.set_function(lambda: float(lease.is_held))
            updates = _make_updates(settings, cell, broker, lease, records) if cell else None
            handlers = _make_handlers(broker, records, pepper, updates, trail)
            api = AdminApi({**handlers, **AuditOperations(audit_log).handlers}, trail)
            providers = open_providers(stack, settings.oidc)
            keys = _make_keys(own_keys, records, pepper, providers, broker)
            checks["records"] = lambda: True
            server = AdminServer(build_app(api, keys, checks))
            working = [
                campaign,
                tasks.create_task(declarer.run(), name="declarer"),
                tasks.create_task(trail.run(), name="audit"),
                tasks.create_task(retry_forever(partial(sample_once, broker)), name="clock"),
                tasks.create_task(serve_nats(broker, api), name="nats"),
            ]
            if updates:
                working.append(tasks.create_task(updates.run(), name="account-updates"))
            serving = tasks.create_task(server.serve([listener]), name="http")
            _log_address(listener)
            await stop.wait()
            server.should_exit = True
            await serving
            for task in working:
                task.cancel()


def _make_keys(
    own_keys: dict[str, str],
    records: Records,
    pepper: Pepper | None,
    providers: Iterable[IdentityProvider],
    broker: Broker,
) -> AdminKeys:
    """Return the keys that open the API: those of the settings, managed keys and tokens."""
    authenticator = Authenticator(
        records.tenants, records.keys, pepper, providers, broker.clock.now, refuses_weak=False
    )
    return AdminKeys(own_keys, authenticator)


async def _begin_audit(
    broker: Broker, settings: AdminSettings, scale: Scale, records: Records
) -> tuple[AuditLog, AuditTrail]:
    """Have every change of a record written into the audit log, which is declared first.

    Each admin service declares it, as nothing is changed without it.
    """
    archived = ChainHead.parse(settings.audit_head) if settings.audit_head else None
    audit_log = AuditLog(broker, archived)
    trail = AuditTrail(audit_log, settings.id)
    stream = topology.audit_stream(settings.audit_bytes)
    await declaration.declare_stream(broker, stream, scale)
    for each in records:
        each.record_changes(trail.record)
    return audit_log, trail


def _make_handlers(
    broker: Broker,
    records: Records,
    pepper: Pepper | None,
    updates: AccountUpdates | None,
    trail: AuditTrail,
) -> dict[str, Handler]:
    """Return what answers each operation, but for those of the audit log."""
    registry, tenants, keys, prices, accounts = records
    account_operations = AccountOperations(broker, tenants, accounts, updates)
    operations = Operations(registry, tenants, keys, account_operations.withdraw_if_any)
    return {
        **operations.handlers,
        **KeyOperations(broker, registry, tenants, keys, pepper).handlers,
        **PriceOperations(registry, prices).handlers,
        **account_operations.handlers,
        **FleetOperations(broker, registry, trail).handlers,
        **ServingOperations(broker, registry).handlers,
        **CurveOperations(broker, registry, trail).handlers,
    }


def _read_keys(settings: AdminSettings) -> dict[str, str]:
    """Return the name of each key's holder, by key."""
    key = settings.admin_key.get_secret_value() if settings.admin_key else ""
    if not key and settings.admin_key_file:
        file = settings.admin_key_file.expanduser()
        try:
            key = file.read_text().strip()
        except OSError as error:
            reason = f"cannot read the key of the admin API in {file}: {error.strerror}"
            raise AdminKeyUnreadable(reason) from None
        if not key:
            raise AdminKeyUnreadable(f"the file {file} of the key of the admin API is empty")
    return {key: "admin-key"} if key else {}


async def _open_records(
    stack: AsyncExitStack, broker: Broker, lease: Lease, settings: AdminSettings
) -> Records:
    """Return the buckets' records once they are loaded."""

    def declares() -> bool:
        return lease.is_held

    async def open_records(kind: type[R]) -> R:
        records = await kind.open(
            broker, seconds=WAIT_SECONDS, declares=declares, replicas=settings.replicas
        )
        stack.push_async_callback(records.close)
        return records

    registry, tenants = await open_records(Registry), await open_records(Tenants)
    keys, prices = await open_records(Keys), await open_records(PriceBook)
    accounts = await open_records(TenantAccounts)
    return Records(registry, tenants, keys, prices, accounts)


def _open_cell(keys: Path) -> CellDirectory:
    """Return the directory of keys; raises `InvalidCellDirectory` if it lacks one."""
    cell = CellDirectory.open(keys.expanduser())
    cell.tenant_basis()
    return cell


def _make_updates(
    settings: AdminSettings, cell: CellDirectory, broker: Broker, lease: Lease, records: Records
) -> AccountUpdates:
    """Return what signs tenants' accounts and tells the servers of them."""
    files = replace(settings.nats_files, creds=cell.user_file(SYSTEM_USER), nkey=None)
    connection = ReconnectingClient(settings.nats, f"admin-{settings.id}-accounts", files)
    return AccountUpdates(connection, cell, records.accounts, records.tenants, lease, broker.clock)


async def _apply_configuration(tenants: Tenants, settings: AdminSettings) -> None:
    """Store the tenants and keys of the configuration; where the audit log is full, those stay."""
    with acting(Caller("configuration"), "tenants.configure"):
        try:
            if settings.replace_tenants or "tenants" in settings.model_fields_set:
                await tenants.apply_config(settings.tenants)
            if settings.api_key:
                await tenants.apply_api_key(settings.api_key)
        except AuditFull as error:
            log.error("configuration_not_applied", reason=str(error))


def _log_address(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    log.info("admin_listening", host=host, port=port)

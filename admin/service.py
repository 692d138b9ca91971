"""`millstream admin`: declares streams and buckets, and changes records for operators."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

import structlog

from admin.admin_api import AdminApi
from admin.admin_keys import AdminKeys
from admin.declarer import Declarer, Records
from admin.http_api import build_app
from admin.http_server import AdminServer, listen
from admin.key_operations import KeyOperations
from admin.metrics import DECLARING
from admin.nats_api import serve_nats
from admin.operations import Operations
from admin.price_operations import PriceOperations
from admin.settings import AdminSettings
from api.authentication.authenticator import Authenticator
from api.authentication.identity_provider import open_providers
from registry.credentials.key_pepper import read_pepper
from registry.credentials.keys import Keys
from registry.kv_records import KvRecords
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenants import Tenants
from streams.broker.broker_client import Broker, connect
from streams.broker.clock_sync import sample_once
from streams.broker.declaration import WAIT_SECONDS
from streams.broker.retry import retry_forever
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import LeaseBucket
from streams.errors import MillstreamError
from streams.metrics_server import not_yet, serve_metrics
from streams.topology import Scale

log = structlog.get_logger()

LEASE = "admin"
R = TypeVar("R", bound=KvRecords[Any])


class AdminKeyUnreadable(MillstreamError):
    """The file with the key of the admin API cannot be read, or is empty."""


async def run(settings: AdminSettings, stop: asyncio.Event) -> None:
    """Declare and answer operators until `stop` is set; then let another process lead at once.

    Raises `AdminAddressUnusable`, `AdminKeyUnreadable`, `PepperUnreadable`, `KeyTaken` for a
    configured key of two tenants, and `BrokerUnavailable` if the broker does not answer at the
    start; those of the broker in an exception group.
    """
    own_keys = _read_keys(settings)
    pepper = read_pepper(settings.key_pepper_file) if settings.key_pepper_file else None
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
            records = await _open_records(stack, broker, lease, settings)
            registry, tenants, managed_keys, prices = records
            scale = Scale(settings.replicas, settings.shards)
            declarer = Declarer(broker, lease, records, scale, settings.ledger_limits)
            DECLARING.set_function(lambda: float(lease.is_held))
            key_operations = KeyOperations(broker, tenants, managed_keys, pepper)
            operations = Operations(registry, tenants, managed_keys)
            price_operations = PriceOperations(registry, prices)
            api = AdminApi(
                {
                    **operations.handlers,
                    **key_operations.handlers,
                    **price_operations.handlers,
                }
            )
            providers = open_providers(stack, settings.oidc)
            authenticator = Authenticator(
                tenants, managed_keys, pepper, providers, broker.clock.now, refuses_weak=False
            )
            keys = AdminKeys(own_keys, authenticator)
            checks["records"] = lambda: True
            server = AdminServer(build_app(api, keys, checks))
            working = [
                campaign,
                tasks.create_task(declarer.run(), name="declarer"),
                tasks.create_task(retry_forever(partial(sample_once, broker)), name="clock"),
                tasks.create_task(serve_nats(broker, api), name="nats"),
            ]
            serving = tasks.create_task(server.serve([listener]), name="http")
            _log_address(listener)
            await stop.wait()
            server.should_exit = True
            await serving
            for task in working:
                task.cancel()


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
    """Return the buckets' records once they are loaded, with the configured tenants among them."""

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
    if settings.replace_tenants or "tenants" in settings.model_fields_set:
        await tenants.apply_config(settings.tenants)
    if settings.api_key:
        await tenants.apply_api_key(settings.api_key)
    return Records(registry, tenants, keys, prices)


def _log_address(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    log.info("admin_listening", host=host, port=port)

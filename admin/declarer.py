"""Declares streams and buckets while this admin service leads."""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import structlog
from nats.js.api import StreamConfig

from admin.metrics import observe_unusable
from registry.credentials.keys import Keys
from registry.credentials.tenant_accounts import TenantAccounts
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenants import Tenants
from streams import job_subjects, subjects, topology
from streams.base_settings import TenantSettings
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.broker.stream_reconciler import StreamReconciler
from streams.coordination.lease import Lease
from streams.errors import BrokerMisconfigured, BrokerUnavailable
from streams.topology import Scale, StreamLimits

log = structlog.get_logger()


class Records(NamedTuple):
    """The buckets that the admin service declares and writes."""

    registry: Registry
    tenants: Tenants
    keys: Keys
    prices: PriceBook
    accounts: TenantAccounts


class Declarer:
    """Keeps streams and buckets as they are declared, while this process holds the lease."""

    def __init__(
        self,
        broker: Broker,
        lease: Lease,
        records: Records,
        scale: Scale,
        limits: StreamLimits,
    ) -> None:
        self._broker, self._lease, self._records = broker, lease, records
        self._scale, self._limits = scale, limits
        self._changed = asyncio.Event()
        self.streams = StreamReconciler(broker, scale, self._make_configs, lambda: lease.is_held)
        self.streams.on_deleted = self._check_buckets
        self.streams.on_change = lambda: observe_unusable(self.streams.unusable)

    def _make_configs(self) -> Iterable[StreamConfig]:
        """Return what to declare, with every lane bounded by the highest limit of any tenant."""
        tenants = self._records.tenants.by_name.values()
        most = max((t.max_queued for t in tenants), default=TenantSettings().max_queued)
        makers = (topology.ingress_stream, topology.answers_stream)
        publishing = [make(name) for name in self._publishing_tenants() for make in makers]
        return [*topology.stream_configs(self._scale, most, self._limits), *publishing]

    def _publishing_tenants(self) -> set[str]:
        return {name for name, tenant in self._records.tenants.by_name.items() if tenant.publishes}

    def _check_buckets(self, stream: str) -> None:
        """Have a bucket restored whose stream was deleted."""
        for records in self._records:
            records.check_bucket(stream)

    async def run(self) -> None:
        """Declare until cancelled, whenever this process leads."""
        self._records.tenants.on_change(self._changed.set)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.streams.run(), name="streams")
            tasks.create_task(self._follow_tenants(), name="tenants")
            while True:
                await self._lease.gained.wait()
                for records in self._records:
                    records.check_bucket(f"KV_{records.bucket}")
                self._changed.set()
                await self._lease.wait_until_lost()

    async def _follow_tenants(self) -> None:
        """Look after each change of tenants, and of who leads, which streams they need."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self.streams.wake()
            if self._lease.is_held:
                await self._remove_unused_streams()

    async def _remove_unused_streams(self) -> None:
        """Delete the empty ingress and answers streams of tenants that do not publish.

        An ingress stream holds what a tenant's producers publish. One that is not empty is kept,
        but accepts no further submissions, and a warning is logged. Answers are kept until they
        expire. If the broker does not let us,
        that harms nobody, and is tried again after the next change.
        """
        try:
            for stream in await declaration.list_streams(self._broker, subjects.ALL_SUBMISSIONS):
                tenant = topology.tenant_of_ingress(stream)
                if tenant is not None and tenant not in self._publishing_tenants():
                    closed = subjects.closed_submissions(tenant)
                    await declaration.remove_if_empty(self._broker, stream, closed)
            for stream in await declaration.list_streams(self._broker, job_subjects.ALL_ANSWERS):
                tenant = topology.tenant_of_answers(stream)
                if tenant is not None and tenant not in self._publishing_tenants():
                    await declaration.delete_if_empty(self._broker, stream)
        except (BrokerUnavailable, BrokerMisconfigured) as error:
            log.warning("streams_not_removed", reason=str(error))

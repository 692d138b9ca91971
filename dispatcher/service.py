"""`millstream dispatcher`: for each registered model, leads it or stands by.

The models are spread over the dispatchers that are there; one that joins is handed its share.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial

import nats.errors
import structlog

from dispatcher.leader_assignment import assign_models
from dispatcher.model_dispatcher import ModelDispatcher
from dispatcher.reconcile.waiting_submissions import WaitingSubmissions
from dispatcher.settings import DispatcherSettings
from registry.store import Registry
from registry.tenants import Tenants
from streams import topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, StoreRefused, connect
from streams.broker.clock_sync import sync_clock
from streams.broker.declaration import WAIT_SECONDS
from streams.coordination.lease import Lease
from streams.coordination.lease_bucket import LeaseBucket
from streams.coordination.membership import Membership
from streams.errors import BrokerUnavailable
from streams.metrics_server import not_yet, serve_metrics
from streams.records import request_queue

log = structlog.get_logger()
_RETRY_SECONDS = 0.25


async def run(settings: DispatcherSettings, stop: asyncio.Event) -> None:
    """Dispatch until `stop` is set; then release all leases, so that standbys take over at once."""
    checks = {"nats": not_yet, "campaigning": not_yet}
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_metrics(settings, checks))
        name = f"dispatcher-{settings.id}"
        broker = await stack.enter_async_context(connect(settings.nats, name, settings.nats_files))
        checks["nats"] = lambda: broker.is_connected
        registry = await Registry.open(broker, seconds=WAIT_SECONDS)
        stack.push_async_callback(registry.close)
        tenants = await Tenants.open(broker, seconds=WAIT_SECONDS)
        stack.push_async_callback(tenants.close)
        await declaration.wait_for_stream(broker, topology.REQUESTS)
        await sync_clock(broker)
        election = LeaderElection(broker, registry, tenants, settings)
        checks["campaigning"] = lambda: election.is_campaigning and not stop.is_set()
        async with asyncio.TaskGroup() as tasks:
            campaigning = tasks.create_task(election.run(), name="election")
            await stop.wait()
            campaigning.cancel()


class LeaderElection:
    """One dispatcher's part in electing a leader for each model.

    It campaigns for one lease (leadership for a limited time) per model, but asks for the lease
    only while the model is assigned to this dispatcher. While it holds a lease, it leads that
    model.
    """

    def __init__(
        self, broker: Broker, registry: Registry, tenants: Tenants, settings: DispatcherSettings
    ) -> None:
        self._broker, self._registry, self._tenants = broker, registry, tenants
        self._settings = settings
        self._submissions = WaitingSubmissions(broker, tenants)
        self._bucket = LeaseBucket(broker)
        self._members = Membership(broker, "dispatchers", settings.id, self._bucket)
        self._leases: dict[str, Lease] = {}
        self._assigned: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def is_campaigning(self) -> bool:
        """True once this dispatcher is a member, which leads or stands by for every model."""
        return self._settings.id in self._members.members

    async def run(self) -> None:
        """Campaign for the lease (leadership for a limited time) of every model, until cancelled.

        Models that are registered later are included. The campaign for a removed model goes on,
        because requests still queued for it must be ended. Cancelling releases all leases. Raises
        an exception group if leading a model fails for a reason other than an unreachable broker.
        """
        self._registry.on_change(self._changed.set)
        self._members.on_change = self._changed.set
        forgotten = await request_queue.list_queued_models(self._broker)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._members.run(), name="members")
                tasks.create_task(self._submissions.run(), name="submissions")
                while True:
                    self._changed.clear()
                    for model in (self._registry.models.keys() | forgotten) - self._leases.keys():
                        tasks.create_task(self._campaign_for(model), name=model)
                    self._assign()
                    await self._changed.wait()
        finally:
            await self._members.leave()

    def _campaign_for(self, model: str) -> Coroutine[None, None, None]:
        """Make the lease of a model, and the coroutine that leads while the lease is held."""
        settings = self._settings
        make_leader = partial(
            ModelDispatcher,
            self._broker,
            self._registry,
            self._tenants,
            self._submissions,
            model,
            settings.shards,
        )
        lease = self._leases[model] = Lease(
            self._broker,
            f"dispatcher.{model}",
            settings.id,
            self._bucket,
            lambda: model in self._assigned,
        )
        return _campaign(lease, make_leader)

    def _assign(self) -> None:
        """Compute anew which models this dispatcher should lead, and wake all leases."""
        members, registered = self._members.members, self._registry.models.keys()
        assigned_to = assign_models(registered, members)
        own = {model for model, chosen in assigned_to.items() if chosen == self._settings.id}
        # A new dispatcher may never have heard of removed models: those who have campaign for them
        self._assigned = own | (self._leases.keys() - registered)
        for lease in self._leases.values():
            lease.wake()


async def _campaign(lease: Lease, make_leader: Callable[[], ModelDispatcher]) -> None:
    """Lead while the lease is held, each time with a new leader that knows nothing yet.

    The lease is released when the model is assigned to another dispatcher, and at the end.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lease.run(), name="lease")
            while True:
                await lease.gained.wait()
                await _lead(lease, make_leader())
                if not lease.is_wanted():
                    await lease.release()
    finally:
        await lease.release()


async def _lead(lease: Lease, leader: ModelDispatcher) -> None:
    """Lead until the lease is lost; returns after `_RETRY_SECONDS` if the broker interrupted it.

    Other errors of the leader are raised.
    """
    leader_task = asyncio.create_task(leader.run(), name="leader")
    lost_task = asyncio.create_task(lease.wait_until_lost(), name="lost")
    try:
        await asyncio.wait({leader_task, lost_task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        lost_task.cancel()
        leader_task.cancel()
        await asyncio.wait({leader_task})
    if not leader_task.cancelled() and (error := leader_task.exception()):
        if not _is_transient(error):
            raise error
        log.warning("leader_interrupted", model=leader.model, reason=repr(error))
        await asyncio.sleep(_RETRY_SECONDS)


def _is_transient(error: BaseException) -> bool:
    """True for errors that pass when the broker is back."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_transient(each) for each in error.exceptions)
    passing = (BrokerUnavailable, StoreRefused, nats.errors.Error, TimeoutError)
    return isinstance(error, passing)

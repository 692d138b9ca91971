"""The parts of one gateway, as every entry point gets them, and authentication of its clients."""

import asyncio
from dataclasses import dataclass, field
from weakref import WeakSet

from api.tokenizer import TokenizerCache
from gateway.admission.offload import OffloadThread
from gateway.admission.submitter import Submitter
from gateway.replies.record_queue import RecordQueue
from gateway.replies.relay import Relay
from gateway.server.connection_limits import ConnectionLimits
from gateway.settings import GatewaySettings
from registry.store import Registry
from registry.tenant_records import Tenant
from registry.tenants import Tenants
from streams.broker.connection import Broker
from streams.broker.stream_declarer import StreamDeclarer
from streams.errors import Refused, Unauthenticated


@dataclass(frozen=True)
class GatewayContext:
    """The parts of one gateway, built once by its service and shared by all entry points."""

    settings: GatewaySettings
    broker: Broker
    registry: Registry
    tenants: Tenants
    tokenizers: TokenizerCache
    submitter: Submitter
    relay: Relay
    streams: StreamDeclarer
    offload_thread: OffloadThread = field(default_factory=OffloadThread)
    connection_limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    record_queues: WeakSet[RecordQueue] = field(default_factory=WeakSet)  # of HTTP responses
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    def authenticate(self, key: str | None) -> Tenant:
        """Return the tenant that an API key belongs to.

        Raises `Unauthenticated` if the key is missing, empty or unknown. Never waits: keys are in
        memory.
        """
        if not key:
            raise Unauthenticated("no API key: send `Authorization: Bearer <key>`")
        tenant = self.tenants.authenticate(key)
        if tenant is None:
            raise Unauthenticated("this API key is not known")
        return tenant

    def check_not_draining(self) -> None:
        """Raise `Refused` if this gateway is shutting down: another one must take the request."""
        if self.draining.is_set():
            raise Refused("this gateway is shutting down")

    @property
    def has_had_workers(self) -> bool:
        """True once any model has had a worker since this gateway started, even if it has none now.

        Requests that come while there is no worker wait in a queue.
        """
        return self.submitter.has_had_workers

    @property
    def worker_counts(self) -> dict[str, int]:
        """The number of workers that serve each registered model, by the last reports."""
        return {name: self.submitter.worker_count(name) for name in self.registry.models}

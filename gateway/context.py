"""The parts of one gateway, as every entry point gets them, and authentication of its clients."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from starlette.types import Scope

from api.submission.validation import SubmissionValidator
from api.tokenizer import TokenizerCache
from api.wrong_keys import WrongKeyLimiter
from gateway.admission.client_requests import ClientRequests
from gateway.admission.ledger_space import LedgerSpace
from gateway.admission.offload_thread import OffloadThread
from gateway.admission.producer_requests import ProducerRequests
from gateway.admission.refusal_recorder import RefusalRecorder
from gateway.admission.submitter import Submitter
from gateway.metrics import FOLLOWED_REQUESTS, UNAUTHENTICATED
from gateway.replies.record_queue import RecordQueue
from gateway.replies.relay import Relay
from gateway.server.client_certificates import certificate_identities, check_origin
from gateway.server.connection_limits import ConnectionLimits
from gateway.settings import GatewaySettings
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenant_records import Tenant
from registry.tenants import Tenants, hash_key
from streams.broker.broker_client import Broker
from streams.broker.stream_monitor import StreamMonitor
from streams.errors import Forbidden, Refused, TooManyWrongKeys, Unauthenticated
from streams.records.usage_rollups import UsageRollups


@dataclass(frozen=True)
class GatewayContext:
    """The parts of one gateway, built once by its service and shared by all entry points."""

    settings: GatewaySettings
    broker: Broker
    registry: Registry
    tenants: Tenants
    prices: PriceBook
    tokenizers: TokenizerCache
    validator: SubmissionValidator
    submitter: Submitter
    client_requests: ClientRequests
    producer_requests: ProducerRequests
    relay: Relay
    streams: StreamMonitor
    offload_thread: OffloadThread
    ledger_space: LedgerSpace
    refusals: RefusalRecorder
    rollups: UsageRollups
    connection_limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    wrong_keys: WrongKeyLimiter = field(default_factory=WrongKeyLimiter)
    record_queues: WeakSet[RecordQueue] = field(default_factory=WeakSet)  # of HTTP responses
    key_checks: set[Callable[[], None]] = field(default_factory=set)  # of open WebSockets
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    def authenticate(self, key: str | None, scope: Scope) -> Tenant:
        """Return the tenant of an API key, or of the client's certificate if there is no key.

        `scope` is that of the request or handshake. Raises `Unauthenticated` if there is neither,
        or the key is unknown; `Forbidden` if key and certificate are of different tenants, or a
        page of another origin uses the certificate of its visitor; `TooManyWrongKeys` if too many
        wrong keys came from the client's address.
        """
        try:
            holders = self.tenants.find_certificate_holders(certificate_identities(scope))
            if not key:
                return self._authenticate_certificate(holders, scope)
            tenant = self._authenticate_key(key, (scope.get("client") or ("",))[0])
            if holders - {tenant.name}:
                raise Forbidden("the API key and the client certificate are of different tenants")
            return tenant
        except (Unauthenticated, TooManyWrongKeys, Forbidden):
            UNAUTHENTICATED.labels(scope["type"]).inc()
            raise

    def _authenticate_certificate(self, holders: set[str], scope: Scope) -> Tenant:
        names = certificate_identities(scope)
        if not holders:
            hint = "; no tenant lists this client certificate" if names else ""
            raise Unauthenticated(f"no API key: send `Authorization: Bearer <key>`{hint}")
        if len(holders) > 1:
            raise Forbidden("the names of this client certificate are of different tenants")
        check_origin(scope, self.settings.cors_origins)
        tenant = self.tenants.get(*holders)
        assert tenant  # holders are tenants that exist
        return tenant

    def _authenticate_key(self, key: str, address: str) -> Tenant:
        digest, now = hash_key(key), time.monotonic()
        self.wrong_keys.check(address, digest, now)
        tenant = self.tenants.find_key_holder(digest)
        if tenant is None:
            self.wrong_keys.record_wrong(address, digest, now)
            raise Unauthenticated("this API key is not known")
        self.wrong_keys.record_right(address, digest)
        return tenant

    def has_credential(self, tenant: str, key_digest: str | None, scope: Scope) -> bool:
        """True while what a handshake was accepted for is the tenant's: key and certificate."""
        holders = self.tenants.find_certificate_holders(certificate_identities(scope))
        if key_digest is None:
            return holders == {tenant}
        return self.tenants.has_key(tenant, key_digest) and not holders - {tenant}

    def check_keys(self) -> None:
        """Have every WebSocket check its credential; called after each change of tenants."""
        for check in [*self.key_checks]:
            check()

    def check_not_draining(self) -> None:
        """Raise `Refused` if this gateway is shutting down: another one must take the request."""
        if self.draining.is_set():
            raise Refused("this gateway is shutting down")

    def refresh_metrics(self) -> None:
        """Set the gauges that are only known when asked for; called before each scrape."""
        FOLLOWED_REQUESTS.set(len(self.relay))

    @property
    def readiness_checks(self) -> dict[str, Callable[[], bool]]:
        """The conditions under which this gateway is ready, by name; each is cheap to call."""
        return {
            "nats": lambda: self.broker.is_connected,
            "workers": lambda: self.has_had_workers,
            "streams": lambda: not self.streams.unusable,
            "accepting": lambda: not self.draining.is_set(),
        }

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

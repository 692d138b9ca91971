"""The parts of one gateway, as every entry point gets them, and authentication of its clients."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from weakref import WeakSet

from starlette.types import Scope as AsgiScope

from api.authentication.authenticator import Authenticator, ClientOrigin, Principal
from api.authentication.principal_watches import Cut, PrincipalWatches
from api.submission.ledger_space import LedgerSpace
from api.submission.response_space import ResponseSpace
from api.submission.validation import SubmissionValidator
from api.tokenizer import TokenizerCache
from api.wrong_keys import WrongKeyLimiter
from gateway.admission.client_requests import ClientRequests
from gateway.admission.fleet_view import FleetView
from gateway.admission.offload_thread import OffloadThread
from gateway.admission.preparation_meter import PreparationMeter
from gateway.admission.producer_requests import ProducerRequests
from gateway.admission.refusal_recorder import RefusalRecorder
from gateway.admission.submitter import Submitter
from gateway.metrics import FOLLOWED_REQUESTS, UNAUTHENTICATED, count_refused
from gateway.replies.record_queue import RecordQueue
from gateway.replies.relay import Relay
from gateway.server.client_certificates import certificate_identities, check_origin
from gateway.server.connection_limits import ConnectionLimits
from gateway.server.key_use_counts import KeyUseCounts
from gateway.server.refusal_log import RefusalLog
from gateway.server.transfer_slots import TransferSlots
from gateway.settings import GatewaySettings
from registry.credentials.keys import Keys
from registry.price_book import PriceBook
from registry.store import Registry
from registry.tenant_records import Scope
from registry.tenants import Tenants, hash_key
from streams.broker.broker_client import Broker
from streams.broker.stream_monitor import StreamMonitor
from streams.errors import (
    CredentialExpired,
    CredentialRevoked,
    MillstreamError,
    Refused,
    Unauthenticated,
)
from streams.records.files.file_store import FileStore
from streams.records.jobs.batch_store import BatchStore
from streams.records.responses.response_store import ResponseStore
from streams.records.usage_rollups import UsageRollups
from streams.records.webhooks.delivery_store import DeliveryStore
from streams.records.webhooks.endpoint_store import EndpointStore


@dataclass(frozen=True)
class GatewayContext:
    """The parts of one gateway, built once by its service and shared by all entry points."""

    settings: GatewaySettings
    broker: Broker
    registry: Registry
    tenants: Tenants
    keys: Keys
    authenticator: Authenticator
    prices: PriceBook
    tokenizers: TokenizerCache
    validator: SubmissionValidator
    preparation: PreparationMeter
    submitter: Submitter
    client_requests: ClientRequests
    producer_requests: ProducerRequests
    relay: Relay
    streams: StreamMonitor
    offload_thread: OffloadThread
    ledger_space: LedgerSpace
    refusals: RefusalRecorder
    rollups: UsageRollups
    files: FileStore
    line_files: FileStore  # inputs and indexes of batches, of which single lines are read
    batches: BatchStore
    responses: ResponseStore
    response_space: ResponseSpace
    webhook_endpoints: EndpointStore
    deliveries: DeliveryStore
    fleet: FleetView
    connection_limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    transfer_slots: TransferSlots = field(default_factory=TransferSlots)
    wrong_keys: WrongKeyLimiter = field(default_factory=WrongKeyLimiter)
    record_queues: WeakSet[RecordQueue] = field(default_factory=WeakSet)  # of HTTP responses
    principal_watches: PrincipalWatches = field(default_factory=PrincipalWatches)
    key_uses: KeyUseCounts = field(default_factory=KeyUseCounts)
    refusal_log: RefusalLog = field(default_factory=RefusalLog)
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    async def authenticate(
        self, credential: str | None, scope: AsgiScope, needed: Scope
    ) -> Principal:
        """Return the principal of a key or token, or of the client's certificate if there is none.

        `scope` is that of the request or handshake, `needed` what the principal must be allowed to
        do. Raises `Unauthenticated` or `Forbidden`, each with the code of its reason, also for a
        credential and a certificate of different tenants, or a page of another origin that uses the
        certificate of its visitor; `IssuerUnreachable`; or `TooManyWrongKeys` if too many wrong
        keys came from the client's address.
        """
        origin = ClientOrigin((scope.get("client") or ("",))[0], certificate_identities(scope))
        try:
            principal = await self._authenticate(credential, origin, scope)
        except MillstreamError as error:
            UNAUTHENTICATED.labels(scope["type"]).inc()
            self.refusal_log.record(scope["type"], origin.address, error.code, time.monotonic())
            raise
        try:
            principal.check(needed)
        except MillstreamError as error:
            count_refused(principal.tenant.name, error.code)
            raise
        self.key_uses.record(principal.tenant.name, principal.key)
        return principal

    async def _authenticate(
        self, credential: str | None, origin: ClientOrigin, scope: AsgiScope
    ) -> Principal:
        if not credential:
            principal = self.authenticator.authenticate_certificate(origin)
            check_origin(scope, self.settings.cors_origins)
            return principal
        if self.authenticator.takes_as_token(credential):
            return await self.authenticator.authenticate(credential, origin)
        digest, now = hash_key(credential), time.monotonic()
        self.wrong_keys.check(origin.address, digest, now)
        try:
            principal = await self.authenticator.authenticate(credential, origin)
        except (CredentialExpired, CredentialRevoked):
            raise  # nobody guesses these
        except Unauthenticated:
            self.wrong_keys.record_wrong(origin.address, digest, now)
            raise
        self.wrong_keys.record_right(origin.address, digest)
        return principal

    def watching(
        self, principal: Principal, needed: Scope, cut: Cut
    ) -> AbstractContextManager[None]:
        """Call `cut` with the reason if the principal ends while the block runs."""
        return self.principal_watches.watching(principal, needed, self.broker.clock.now, cut)

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
            "workers": lambda: self.has_had_workers or self.fleet.is_there,
            "streams": lambda: not self.streams.unusable,
            "accepting": lambda: not self.draining.is_set(),
        }

    @property
    def has_had_workers(self) -> bool:
        """True once any model has had a worker since this gateway started, even if it has none now.

        Requests that come while there is no worker wait in a queue.
        """
        return self.submitter.has_had_workers

    def is_asleep(self, model: str) -> bool:
        """Return True if a model is known to have no worker, and the fleet starts one on demand."""
        return self.submitter.has_no_worker(model) and self.fleet.cold_start(model) is not None

    @property
    def worker_counts(self) -> dict[str, int]:
        """The number of workers that serve each registered model, by the last reports."""
        return {name: self.submitter.worker_count(name) for name in self.registry.models}

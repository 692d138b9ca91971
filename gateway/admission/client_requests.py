"""Client requests: submits what comes over HTTP or a WebSocket, and subscribes to its replies."""

import time
from dataclasses import dataclass

from api.submission.quota_checks import quota_scopes
from api.submission.quotas import Quotas
from api.submission.validation import ValidatedRequest
from gateway.admission.submitter import (
    ACCEPT_SECONDS,
    EXPIRY_MARGIN_SECONDS,
    RequestClaim,
    SubmitOutcome,
    Submitter,
)
from gateway.replies.log_subscription import LogSubscription, Sink
from gateway.replies.relay import Relay
from registry.models import Model, Version
from registry.tenant_records import Tenant
from streams import messages
from streams.broker.retry import broker_timeout
from streams.errors import MillstreamError, RequestNotFound
from streams.messages import Record


@dataclass(frozen=True)
class Ticket:
    """An accepted request, to whose token log (its stored answer) this gateway is subscribed.

    The subscription's sink gets the records of the log; exactly one of them, the last, is a `done`
    or an `error`. `admit_ms` is the time from the submission to the broker's confirmation.
    """

    request_id: str
    model: Model
    version: Version  # for which it was tokenised
    subscription: LogSubscription
    admit_ms: float
    prompt_tokens: int
    is_new: bool = True  # False: an idempotency key led to a request that was there already


class ClientRequests:
    """Submits the requests of clients whose replies this gateway relays."""

    def __init__(self, submitter: Submitter, relay: Relay) -> None:
        self._submitter, self._relay = submitter, relay

    async def submit(
        self, validated: ValidatedRequest, sink: Sink, key: str | None = None
    ) -> Ticket:
        """Queue a request; return once the broker has stored it.

        If the idempotency `key` was used before for an equal submission, the result is that earlier
        request, which is not queued again if the broker has it. `sink` gets the records. Raises a
        `BadRequest` or a `Refused` that says why the request is not accepted. After a
        `BrokerUnavailable` or a cancellation the request may have been stored; then it is
        cancelled, with a key only after the grace period.
        """
        tenant, digest = validated.tenant.name, ""
        if key is not None:
            digest = await self._submitter.compute_digest(validated)
        with self._relay.recording_refusals():
            async with broker_timeout(ACCEPT_SECONDS):
                claim = await self._submitter.claim(tenant, key, digest)
                subscription = await self._subscribe(claim, tenant, sink)
                if not subscription.is_durable:
                    subscription = await self._queue(validated, claim, subscription)
        admit_ms = (time.monotonic() - validated.started_at) * 1000
        count = validated.packed.prompt_tokens
        return Ticket(
            claim.request_id,
            validated.model,
            validated.version,
            subscription,
            admit_ms,
            count,
            claim.is_first,
        )

    async def check_key_known(self, tenant: str, key: str) -> None:
        """Raise `RequestNotFound` if an idempotency key stands for no request of the tenant."""
        with self._relay.recording_refusals():
            async with broker_timeout(ACCEPT_SECONDS):
                if await self._submitter.find_key(tenant, key) is None:
                    raise RequestNotFound(f"Idempotency-Key: {key.splitlines()[0]}")

    async def _subscribe(self, claim: RequestClaim, tenant: str, sink: Sink) -> LogSubscription:
        if claim.is_first:
            return self._relay.subscribe_new(tenant, claim.request_id, sink)
        return await self._relay.subscribe_existing(tenant, claim.request_id, sink)

    async def _queue(
        self, validated: ValidatedRequest, claim: RequestClaim, subscription: LogSubscription
    ) -> LogSubscription:
        """Queue the request; returns the subscription to use, another one if somebody was faster.

        It is unknown whether the broker has a request that it did not confirm, so it is cancelled;
        with a key only after the grace period, since a retry under the key asks for this request.
        """
        expires_at = time.monotonic() + validated.deadline_seconds + EXPIRY_MARGIN_SECONDS
        subscription.deadlines.expires_at = expires_at
        sink, quotas = subscription.sink, self._submitter.quotas
        subscription.sink = _settling_sink(quotas, validated.tenant, claim.request_id, sink)
        give_up = self._relay.cancel_unconfirmed if claim.key is None else self._relay.orphan
        try:
            outcome = await self._submitter.submit(validated, claim, self._relay.route)
        except MillstreamError as error:
            if error.may_have_succeeded:
                give_up(subscription)
            else:
                await self._relay.unsubscribe(subscription)
            raise
        except BaseException:
            give_up(subscription)
            raise
        # A reply on our own route shows that the stored request is of this very call
        if outcome is SubmitOutcome.STORED or subscription.cursor.last_seq:
            subscription.is_durable = True
            return subscription
        await self._relay.unsubscribe(subscription)  # replies go to the route of the first one
        return await self._relay.subscribe_existing(validated.tenant.name, claim.request_id, sink)


def _settling_sink(quotas: Quotas, tenant: Tenant, request_id: str, sink: Sink) -> Sink:
    """Return a sink that settles the request's quotas at its terminal, before its client sees it.

    For tenants without quotas it is `sink` itself.
    """
    if not quota_scopes(tenant):
        return sink

    def put(record: Record, size: int) -> bool:
        if record["type"] in messages.TERMINAL_TYPES:
            quotas.settle(request_id, record["usage"]["total_tokens"])
        return sink(record, size)

    return put

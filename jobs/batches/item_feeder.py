"""Publishes the items of jobs as requests, under the quotas of their tenants."""

import json
from dataclasses import replace

from api.batches.batch_line import parse_body, to_submission
from api.submission.ledger_space import LedgerSpace
from api.submission.quotas import Quotas
from api.submission.submission_record import Submission
from api.submission.validation import SubmissionValidator, ValidatedRequest
from jobs.batches.line_states import LineState
from registry.credentials.keys import Keys
from registry.tenant_records import ApiKey, Tenant
from registry.tenants import Tenants
from streams.broker.broker_client import Broker, PubAck
from streams.errors import BadRequest, MillstreamError
from streams.headers import MESSAGE_ID, ItemRef
from streams.messages import openai_usage
from streams.records import request_queue
from streams.records.jobs.batch_records import Batch
from streams.records.jobs.item_results import ItemResult, make_request_id
from streams.records.jobs.result_store import store_result

ROUTE = "jobs"  # of all items' token logs; readers hear replies on any route
ENQUEUE_SECONDS = 5.0
# So long after its deadline a request has ended or was never stored
EXPIRY_MARGIN_SECONDS = 15.0


class BatchRefused(MillstreamError):
    """A whole job cannot go on: its tenant or its key is gone."""

    code = "batch_refused"


class ItemFeeder:
    """Turns items into queued requests; the same item and try is always the same request."""

    def __init__(
        self,
        broker: Broker,
        tenants: Tenants,
        keys: Keys,
        validator: SubmissionValidator,
        quotas: Quotas,
        ledger_space: LedgerSpace,
    ) -> None:
        self._broker, self._tenants, self._keys = broker, tenants, keys
        self._validator, self._quotas, self._ledger_space = validator, quotas, ledger_space

    def find_tenant(self, name: str, packed_key: str) -> Tenant:
        """Return a tenant, limited as the key that created a job; raises `BatchRefused`.

        The key's own limits are those that it had then, as JSON in `packed_key`; if it was revoked
        since, nothing more is published.
        """
        tenant = self._tenants.get(name)
        if tenant is None:
            raise BatchRefused(f"the tenant {name!r} is gone")
        key = ApiKey.model_validate(json.loads(packed_key)) if packed_key else None
        if key and key.id:
            managed = self._keys.get(key.id)
            if managed and (managed.revoked_at is not None or managed.is_disabled):
                raise BatchRefused(f"the API key {key.name!r} that asked for it was revoked")
        return tenant.model_copy(update={"key": key})

    async def publish_line(self, batch: Batch, state: LineState, tenant: Tenant) -> float:
        """Queue a line's request; return by when it has ended, in seconds from now.

        A line that its endpoint would refuse gets its result at once, and 0 is returned. Raises
        `Refused` if the line must wait; then it is the same try later.
        """
        request_id = make_request_id(batch.secret, state.source.index, state.attempt)
        ref = ItemRef(batch.id, state.source.index, state.attempt, state.is_last)
        try:
            submission = to_submission(state.line, parse_body(state.line))
            return await self.publish(tenant, request_id, ref, submission)
        except BadRequest as error:
            await self.refuse(tenant.name, ref, request_id, error)
            return 0.0

    async def validate(self, tenant: Tenant, submission: Submission) -> None:
        """Raise `BadRequest` as the endpoint of an item would; nothing is published."""
        await self._validator.validate(tenant, submission)

    async def publish(
        self, tenant: Tenant, request_id: str, ref: ItemRef, submission: Submission
    ) -> float:
        """Queue the request that runs an item; return by when it has ended, in seconds from now.

        Raises `BadRequest` as its endpoint would, and `Refused` if it must wait.
        """
        self._ledger_space.check()
        (validated,) = await self._validator.validate(tenant, submission)
        seconds = validated.deadline_seconds + EXPIRY_MARGIN_SECONDS
        reservation = await self._quotas.reserve(
            tenant, validated.model.name, request_id, validated.amounts, seconds
        )
        try:
            stored = await self._enqueue(validated, request_id, ref)
        except MillstreamError as error:
            if reservation and not error.may_have_succeeded:
                self._quotas.release(reservation)
            raise
        if reservation and not stored.duplicate:
            self._quotas.confirm(reservation)
        elif reservation and not stored.repeated:  # an earlier process has queued this try
            self._quotas.release(reservation)
        return seconds

    async def _enqueue(self, validated: ValidatedRequest, request_id: str, ref: ItemRef) -> PubAck:
        reservation, now = self._quotas.find(request_id), self._broker.clock.now_ms()
        envelope = validated.build_envelope(request_id, ROUTE, reservation, None, now)
        headers = replace(envelope, item=ref).to_headers() | {MESSAGE_ID: request_id}
        return await request_queue.enqueue(
            self._broker, validated.lane, validated.packed.payload, headers, ENQUEUE_SECONDS
        )

    async def refuse(
        self, tenant: str, ref: ItemRef, request_id: str, error: MillstreamError
    ) -> None:
        """Store the result of an item that is not run, or not run to its end."""
        now = self._broker.clock.now_ms()
        usage = openai_usage(0, 0)
        result = ItemResult(
            request_id, ref.attempt, now, code=error.code, message=error.message, usage=usage
        )
        await store_result(self._broker, tenant, replace(ref, is_last=True), result)

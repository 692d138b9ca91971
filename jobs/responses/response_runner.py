"""Brings one response to its end: runs it in the background, cancels it, or removes it."""

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import structlog
from nats.aio.msg import Msg

from api.endpoints.completion_endpoint import CHAT
from api.responses.chat_translation import to_chat
from api.responses.conversation import head_of, read_earlier
from api.responses.response_bodies import ResponseEnd, response_id
from api.responses.truncation import fit_chat
from api.submission.submission_record import Submission
from jobs.batches.item_feeder import BatchRefused, ItemFeeder
from jobs.metrics import RESPONSES
from registry.store import Registry
from registry.tenant_records import Tenant
from streams import job_subjects, subjects
from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BadRequest, Ended, Forbidden, MillstreamError, NoWorkers, Refused
from streams.records.jobs.item_results import CANCELLED, ItemResult
from streams.records.jobs.result_store import has_failed_try
from streams.records.responses.response_records import ITEM, StoredResponse, make_item_ref
from streams.records.responses.response_store import ResponseStore
from streams.records.webhooks.event_outbox import store_event
from streams.records.webhooks.events import EventType, WebhookEvent

log = structlog.get_logger()

TICK_SECONDS = 5.0  # between looks at a response of which nothing is heard
RETRY_SECONDS = 1.0
CANCEL_SECONDS = 0.5  # between cancels, until the response has ended
# So long after the first cancel a response ends without its request, which perhaps never was
MAX_CANCEL_SECONDS = 10.0
MAX_QUEUED_SECONDS = 86_400  # for which a response is queued again when its deadline passes


class ResponseRunner:
    """One response that needs work, in the hands of the process that holds the lease."""

    def __init__(
        self, broker: Broker, registry: Registry, feeder: ItemFeeder, tenant: str, response: str
    ) -> None:
        self._broker, self._registry, self._feeder = broker, registry, feeder
        self._store = ResponseStore(broker)
        self._tenant, self._id = tenant, response
        self._wake = asyncio.Event()
        self._due = -math.inf  # when to publish the current attempt (again), monotonic seconds
        self._may_be_lost = False  # the request that was published
        self._cancelled_at: float | None = None
        self._logger = log.bind(tenant=tenant, response=response)

    def wake(self) -> None:
        """Look now whether a client has changed the response; returns at once."""
        self._wake.set()

    def repeat_request(self) -> None:
        """Publish the request again now: its queue is another one. Returns at once.

        One that is queued or running elsewhere is recognised by its id.
        """
        self._may_be_lost = True
        self._wake.set()

    async def run(self) -> None:
        """Return when the response needs no more work; cancelling leaves it to another process.

        Raises `BrokerUnavailable` and other errors of the broker.
        """
        heard = job_subjects.resulted(self._tenant, self._id)
        subscription = await self._broker.subscribe(heard, self._on_result)
        try:
            note = await self._store.find_pending(self._tenant, self._id)
            while (seconds := await self._advance()) is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await subscription.unsubscribe()
        await self._store.unmark_pending(self._tenant, self._id, note)

    async def _on_result(self, msg: Msg) -> None:
        self._wake.set()

    async def _advance(self) -> float | None:
        """Do what is due; return after how many seconds to look again, None if all is done."""
        response = await self._store.find_any(self._tenant, self._id)
        if response is None:
            return None
        if response.is_gone(self._broker.clock.now()):
            return await self._remove(response)
        if result := await self._store.find_result(response):
            await self._settle(result)
            return None
        if response.is_cancelled:
            return await self._cancel(response)
        if await self._has_failed_try(response):
            response = await self._next_attempt(response)
        if self._may_be_lost or time.monotonic() >= self._due:
            self._may_be_lost = False
            await self._publish(response)
        return min(TICK_SECONDS, max(0.0, self._due - time.monotonic()))

    async def _settle(self, result: ItemResult) -> None:
        """Tell webhooks that a background response has ended; again, if this process dies now."""
        status = ResponseEnd.from_result(result).status
        event = WebhookEvent(self._tenant, EventType(f"response.{status}"), response_id(self._id))
        await store_event(self._broker, event)
        RESPONSES.labels(status).inc()
        self._logger.info("response_ended", status=status, code=result.code)

    async def _remove(self, response: StoredResponse) -> float | None:
        """Remove a deleted response, once nothing of it can come any more."""
        if await self._store.find_result(response) is None:
            return await self._cancel(response)
        await self._store.remove(response)
        self._logger.info("response_removed")
        return None

    async def _cancel(self, response: StoredResponse) -> float:
        """Cancel the request that runs a response; end the response if that has no effect."""
        now = time.monotonic()
        if self._cancelled_at is None:
            self._cancelled_at = now
        signal = subjects.cancel(self._tenant, response.request_id)
        await self._broker.store(signal, b"")
        if now - self._cancelled_at >= MAX_CANCEL_SECONDS:
            await self._refuse(response, Ended(CANCELLED, "the response was cancelled"))
            return 0.0
        return CANCEL_SECONDS

    async def _has_failed_try(self, response: StoredResponse) -> bool:
        return await has_failed_try(self._broker, self._tenant, self._id, ITEM, response.attempt)

    async def _next_attempt(self, response: StoredResponse) -> StoredResponse:
        """Return the record with another attempt: the last one ended in the queue."""
        if self._broker.clock.now() - response.created_at >= MAX_QUEUED_SECONDS:
            hours = MAX_QUEUED_SECONDS // 3600
            message = f"no worker has begun the response within {hours} hours"
            await self._refuse(response, NoWorkers(message))
            return response
        attempt = response.attempt + 1
        changed = await self._store.change(response, lambda it: replace(it, attempt=attempt))
        self._due = -math.inf
        self._logger.info("response_queued_again", attempt=attempt)
        return changed or response

    async def _publish(self, response: StoredResponse) -> None:
        """Queue the current attempt; one that is queued already is not queued twice."""
        ref = make_item_ref(response.id, response.attempt)
        try:
            tenant = self._feeder.find_tenant(response.tenant, response.key)
            submission = await self._build_submission(response, tenant)
            seconds = await self._feeder.publish(tenant, response.request_id, ref, submission)
        except BadRequest as error:
            await self._refuse(response, error)
            seconds = 0.0
        except BatchRefused as error:
            await self._refuse(response, Forbidden(error.message))
            seconds = 0.0
        except (Refused, StoreRefused) as error:
            wanted = error.retry_after_seconds if isinstance(error, Refused) else None
            seconds = wanted or RETRY_SECONDS
        except MillstreamError as error:  # such as a tokeniser that cannot be read
            self._logger.warning("response_not_published", reason=str(error))
            seconds = RETRY_SECONDS
        self._due = time.monotonic() + seconds

    async def _build_submission(self, response: StoredResponse, tenant: Tenant) -> Submission:
        body = head_of(response).body
        earlier = await read_earlier(self._store, self._registry, response.tenant, body)
        if body.truncation == "auto":
            chat = await fit_chat(body, earlier, partial(self._feeder.validate, tenant))
        else:
            chat = to_chat(body, earlier)
        (submission,) = CHAT.to_submissions(chat)
        return submission

    async def _refuse(self, response: StoredResponse, error: MillstreamError) -> None:
        ref = make_item_ref(response.id, response.attempt)
        await self._feeder.refuse(response.tenant, ref, response.request_id, error)

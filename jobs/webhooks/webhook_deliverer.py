"""Delivers webhooks while this process holds the lease: what is due, endpoint by endpoint.

An attempt is noted when it has ended. A process that dies before has maybe delivered, and the next
one posts the same body with the same id again: at least once, never otherwise.
"""

import asyncio
import random
from collections.abc import Awaitable, Sequence

import structlog

from jobs.metrics import PENDING_WEBHOOKS, WEBHOOK_ATTEMPTS, WEBHOOK_SECONDS
from jobs.webhooks.delivery_queue import DeliveryQueue
from jobs.webhooks.event_fan_out import EventFanOut
from jobs.webhooks.retry_schedule import next_delay
from jobs.webhooks.webhook_call import WebhookAnswer, WebhookCaller
from streams.broker.broker_client import Broker, StoreRefused
from streams.coordination.lease import Lease
from streams.errors import MillstreamError
from streams.records.webhooks.delivery_records import (
    DeliveryAttempt,
    DeliveryKey,
    WebhookDelivery,
)
from streams.records.webhooks.delivery_store import DeliveryStore
from streams.records.webhooks.endpoint_records import WebhookEndpoint
from streams.records.webhooks.endpoint_store import EndpointStore
from streams.records.webhooks.signatures import signature_headers

log = structlog.get_logger()

LOOK_SECONDS = 0.25
SWEEP_SECONDS = 30.0
PAUSE_SECONDS = 1.0
BROKEN_SECONDS = 60.0
GONE = 410
GONE_REASON = "it has answered 410 Gone"


class WebhookDeliverer:
    """Fans events out and delivers them, in the process that holds `lease`.

    `retry_seconds` are the pauses between the attempts of one delivery.
    """

    def __init__(
        self, broker: Broker, lease: Lease, caller: WebhookCaller, retry_seconds: Sequence[float]
    ) -> None:
        self._broker, self._lease, self._caller = broker, lease, caller
        self._retry_seconds = retry_seconds
        self._endpoints, self._deliveries = EndpointStore(broker), DeliveryStore(broker)

    async def run(self) -> None:
        """Deliver whenever this process holds the lease, until cancelled."""
        while True:
            await self._lease.gained.wait()
            await self._lease.run_while_held(self._lead())
            PENDING_WEBHOOKS.set(0)

    async def _lead(self) -> None:
        """Deliver until cancelled, beginning with what other processes have left."""
        try:
            leadership = _Leadership(
                self._broker, self._endpoints, self._deliveries, self._caller, self._retry_seconds
            )
            await leadership.run()
        except (MillstreamError, StoreRefused) as error:
            log.warning("webhooks_interrupted", reason=str(error))
            await asyncio.sleep(PAUSE_SECONDS)
        except Exception:
            log.exception("webhooks_broke")
            await asyncio.sleep(PAUSE_SECONDS)


class _Leadership:
    """The deliveries as they are known during one tenure of the lease."""

    def __init__(
        self,
        broker: Broker,
        endpoints: EndpointStore,
        deliveries: DeliveryStore,
        caller: WebhookCaller,
        retry_seconds: Sequence[float],
    ) -> None:
        self._broker, self._caller, self._retry_seconds = broker, caller, retry_seconds
        self._endpoints, self._deliveries = endpoints, deliveries
        self._queue = DeliveryQueue()
        self._fan_out = EventFanOut(broker, endpoints, deliveries, self._queue)
        self._read_to = 0  # sequence of the last record that was taken over
        self._wakeup = asyncio.Event()

    async def run(self) -> None:
        await self._read_changes()
        await self._fan_out.open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look(), name="webhook-events")
            tasks.create_task(self._sweep(), name="webhook-sweep")
            while True:
                self._wakeup.clear()
                for key in self._queue.take_due(self._broker.clock.now()):
                    tasks.create_task(self._attempt(key), name=f"webhook-{key.event}")
                PENDING_WEBHOOKS.set(len(self._queue))
                await self._wait()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._wakeup.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        """Take over what is new, beside the attempts."""
        while True:
            await self._leave_for_later(self._fan_out.run_once())
            await self._leave_for_later(self._read_changes())
            self._wakeup.set()
            await asyncio.sleep(LOOK_SECONDS)

    async def _sweep(self) -> None:
        """Remove what is kept no longer, beside the rest: of a busy endpoint that is much."""
        while True:
            await self._leave_for_later(self._endpoints.remove_deleted())
            await self._leave_for_later(self._remove_outdated())
            await asyncio.sleep(SWEEP_SECONDS)

    async def _leave_for_later(self, step: Awaitable[None]) -> None:
        """Await a step; what the broker does not do now is tried again the next time."""
        try:
            await step
        except (MillstreamError, StoreRefused) as error:
            log.warning("webhooks_not_read", reason=str(error))

    async def _read_changes(self) -> None:
        after = -1
        while after < self._read_to:
            after = self._read_to
            found, self._read_to = await self._deliveries.list_changed(after)
            for delivery in found:
                self._queue.note(delivery)

    async def _remove_outdated(self) -> None:
        for revision in self._queue.take_outdated():
            await self._deliveries.remove(revision)

    async def _attempt(self, key: DeliveryKey) -> None:
        is_failing = True
        try:
            is_failing = not await self._try(key)
        except (MillstreamError, StoreRefused) as error:
            log.warning("webhook_not_noted", endpoint=key.endpoint, reason=str(error))
            self._queue.put_off(key, self._broker.clock.now() + PAUSE_SECONDS)
        except Exception:  # of one endpoint, which must not stop the others'
            log.exception("webhook_broke", endpoint=key.endpoint)
            self._queue.put_off(key, self._broker.clock.now() + BROKEN_SECONDS)
        finally:
            self._queue.release(key, is_failing=is_failing)
            self._wakeup.set()

    async def _try(self, key: DeliveryKey) -> bool:
        """Make an attempt if there is to be one, and note it; return whether it was a success."""
        delivery = await self._deliveries.find(key)
        if delivery is None:
            self._queue.forget(key)
            return True
        endpoint = await self._endpoints.find(key.tenant, key.endpoint)
        if endpoint is None or (endpoint.disabled_reason and not delivery.is_test):
            await self._store(delivery.as_failed(), delivery)
            return True
        at = self._broker.clock.now()
        answer = await self._post(endpoint, delivery, at)
        milliseconds = round((self._broker.clock.now() - at) * 1000)
        attempt = DeliveryAttempt(at, milliseconds, answer.status, answer.error)
        tried = delivery.with_attempt(attempt, self._next_at(delivery, answer))
        await self._store(tried, delivery)
        _report(tried, attempt)
        if answer.status == GONE:
            await self._disable(endpoint)
        return attempt.is_success

    async def _store(self, ended: WebhookDelivery, before: WebhookDelivery) -> None:
        """Store a record; if a client has asked for the delivery anew meanwhile, that goes on."""

        def apply(known: WebhookDelivery) -> WebhookDelivery:
            return ended if known.revision == before.revision else known

        stored = await self._deliveries.change(before, apply)
        if stored:
            self._queue.note(stored)
        else:
            self._queue.forget(before.key)

    async def _post(
        self, endpoint: WebhookEndpoint, delivery: WebhookDelivery, at: float
    ) -> WebhookAnswer:
        keys = endpoint.signing_keys(at)
        headers = signature_headers(keys, delivery.event, int(at), delivery.body)
        with WEBHOOK_SECONDS.time():
            return await self._caller.post(endpoint.url, headers, delivery.body)

    def _next_at(self, delivery: WebhookDelivery, answer: WebhookAnswer) -> float | None:
        if delivery.is_test or answer.status == GONE:
            return None
        delay = next_delay(
            delivery.tries + 1,
            answer.retry_after,
            random.random(),
            self._retry_seconds,
        )
        return None if delay is None else self._broker.clock.now() + delay

    async def _disable(self, endpoint: WebhookEndpoint) -> None:
        await self._endpoints.change(endpoint, lambda it: it.as_disabled(GONE_REASON))
        log.warning("webhook_disabled", tenant=endpoint.tenant, endpoint=endpoint.id)


def _report(delivery: WebhookDelivery, attempt: DeliveryAttempt) -> None:
    WEBHOOK_ATTEMPTS.labels("delivered" if attempt.is_success else "failed").inc()
    log.info(
        "webhook_attempted",
        tenant=delivery.tenant,
        endpoint=delivery.endpoint,
        event_id=delivery.event,
        delivery=delivery.status.value,
        attempt=delivery.tries,
        status=attempt.status,
        reason=attempt.error,
    )

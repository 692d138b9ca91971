"""Routes of deliveries to a webhook endpoint: a test, the log, and sending one again.

A test is OpenAI's; the log and redelivery are ours. This gateway calls nobody: it stores what is to
be sent, and a jobs service sends it.
"""

import asyncio
from functools import partial
from secrets import token_hex

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api import webhook_bodies
from api.openai_bodies import page_body
from api.schemas.parsing import decode, parse
from api.schemas.webhooks import TestWebhookEndpoint
from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import read_body_in_time, request_key
from gateway.entrypoints.plain_responses import cut_page, render_json
from gateway.entrypoints.webhooks.endpoint_routes import find_endpoint
from gateway.entrypoints.webhooks.openapi_paths import DEFAULT_PAGE, MAX_DELIVERIES
from streams.errors import BadRequest, NotFound, Overloaded
from streams.records.webhooks.delivery_records import (
    DeliveryAttempt,
    DeliveryKey,
    DeliveryStatus,
    WebhookDelivery,
)
from streams.records.webhooks.endpoint_records import WebhookEndpoint
from streams.records.webhooks.events import EventType, WebhookEvent, encode_event, event_id

log = structlog.get_logger()

TEST_SECONDS = 45.0  # two attempts: one that hangs may be under way
POLL_SECONDS = 0.1
SAMPLE_ID = "0" * 24


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the routes below `/v1/webhook_endpoints/{id}` that are about what is sent."""
    endpoint = "/v1/webhook_endpoints/{endpoint}"
    again = f"{endpoint}/deliveries/{{event}}/redeliver"
    return [
        Route(f"{endpoint}/test", partial(_test, context), methods=["POST"]),
        Route(f"{endpoint}/deliveries", partial(_list, context), methods=["GET"]),
        Route(again, partial(_redeliver, context), methods=["POST"]),
    ]


async def _test(context: GatewayContext, request: Request) -> Response:
    """Answer with the status that the endpoint has answered a sample event with."""
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    endpoint = await find_endpoint(context, principal, request.path_params["endpoint"])
    data = await read_body_in_time(request, context.settings.max_body_bytes)
    kind = parse(TestWebhookEndpoint, decode(data)).event_type
    sample = _make_sample(endpoint, EventType(kind), context.broker.clock.now())
    await context.deliveries.create(sample)
    attempt = await _wait_for_attempt(context, sample.key)
    if attempt.status is None:
        raise BadRequest(f"the endpoint did not answer: {attempt.error}", "url")
    return render_json(webhook_bodies.test_result(endpoint, kind, attempt.status))


def _make_sample(endpoint: WebhookEndpoint, kind: EventType, now: float) -> WebhookDelivery:
    """An event of this type that has not happened; it is due before all others."""
    object_id = f"{kind.partition('.')[0]}_{SAMPLE_ID}"
    subject = f"{WebhookEvent(endpoint.tenant, kind, object_id).subject}.{token_hex(12)}"
    body = encode_event(subject, kind, {"id": object_id}, now)
    return WebhookDelivery(
        tenant=endpoint.tenant,
        endpoint=endpoint.id,
        event=event_id(subject),
        type=kind,
        body=body,
        created_at=int(now),
        due_at=0.0,
        is_test=True,
    )


async def _wait_for_attempt(context: GatewayContext, key: DeliveryKey) -> DeliveryAttempt:
    """Return how a delivery that is tried once went; raises `Overloaded` if nobody tries it."""
    loop = asyncio.get_running_loop()
    until = loop.time() + TEST_SECONDS
    while loop.time() < until:
        found = await context.deliveries.find(key)
        if found and found.attempts:
            return found.attempts[-1]
        if found and found.status is DeliveryStatus.FAILED:
            break
        await asyncio.sleep(POLL_SECONDS)
    raise Overloaded(
        f"no jobs service has sent the test within {TEST_SECONDS:g} s; see whether one runs"
    )


async def _list(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    endpoint = await find_endpoint(context, principal, request.path_params["endpoint"])
    deliveries = await context.deliveries.list_of(endpoint.tenant, endpoint.id)
    query = request.query_params
    page, has_more = cut_page(
        deliveries, webhook_bodies.delivery_id, query, DEFAULT_PAGE, MAX_DELIVERIES
    )
    data = [webhook_bodies.delivery_object(delivery) for delivery in page]
    return render_json(page_body(data, has_more=has_more))


async def _redeliver(context: GatewayContext, request: Request) -> Response:
    """Begin a delivery anew, with the same id, whatever has become of it."""
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    endpoint = await find_endpoint(context, principal, request.path_params["endpoint"])
    told, now = request.path_params["event"], context.broker.clock.now()
    found = await context.deliveries.find(DeliveryKey(endpoint.tenant, endpoint.id, told))
    changed = found and await context.deliveries.change(found, lambda it: it.redelivered(now))
    if not changed:
        raise NotFound(f"there is no delivery {told!r} to this endpoint, or its time is over")
    log.info("webhook_redelivered", tenant=endpoint.tenant, endpoint=endpoint.id, event_id=told)
    return render_json(webhook_bodies.delivery_object(changed))

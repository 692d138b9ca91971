"""`/v1/webhook_endpoints` and `/v1/webhook_event_types`, as the OpenAI SDK has them."""

from dataclasses import replace
from functools import partial
from secrets import token_bytes, token_hex

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from api import webhook_bodies
from api.authentication.authenticator import Principal
from api.openai_bodies import page_body
from api.schemas.parsing import decode, parse
from api.schemas.webhooks import (
    CreateWebhookEndpoint,
    RotateWebhookSecret,
    UpdateWebhookEndpoint,
)
from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import read_body_in_time, request_key
from gateway.entrypoints.plain_responses import cut_page, render_json
from gateway.entrypoints.webhooks.openapi_paths import DEFAULT_PAGE, MAX_PAGE
from registry.webhook_policy import WebhookPolicy, WebhookRefused, parse_webhook_url
from streams.errors import BadRequest
from streams.records.webhooks.endpoint_records import SigningSecret, WebhookEndpoint
from streams.records.webhooks.signatures import SECRET_BYTES

log = structlog.get_logger()

DISABLED_BY_CLIENT = "a client has disabled it"


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the routes of endpoints and of the types of events."""
    endpoints, endpoint = "/v1/webhook_endpoints", "/v1/webhook_endpoints/{endpoint}"
    return [
        Route("/v1/webhook_event_types", partial(_list_types, context), methods=["GET"]),
        Route(endpoints, partial(_create, context), methods=["POST"]),
        Route(endpoints, partial(_list, context), methods=["GET"]),
        Route(endpoint, partial(_show, context), methods=["GET"]),
        Route(endpoint, partial(_update, context), methods=["POST"]),
        Route(endpoint, partial(_delete, context), methods=["DELETE"]),
        Route(f"{endpoint}/rotate_secret", partial(_rotate, context), methods=["POST"]),
    ]


async def find_endpoint(
    context: GatewayContext, principal: Principal, told: str
) -> WebhookEndpoint:
    """Return a tenant's endpoint by the id that a client has told; raises `NotFound`."""
    bare = webhook_bodies.parse_endpoint_id(told)
    found = await context.webhook_endpoints.find(principal.tenant.name, bare)
    if found is None:
        raise webhook_bodies.endpoint_not_found(told)
    return found


async def _list_types(context: GatewayContext, request: Request) -> Response:
    await context.authenticate(request_key(request), request.scope, "jobs")
    return render_json(webhook_bodies.event_types())


async def _create(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    context.check_not_draining()
    data = await read_body_in_time(request, context.settings.max_body_bytes)
    body = parse(CreateWebhookEndpoint, decode(data))
    _check_url(context, body.url)
    now = int(context.broker.clock.now())
    endpoint = WebhookEndpoint(
        tenant=principal.tenant.name,
        id=token_hex(12),
        name=body.name,
        url=body.url,
        event_types=tuple(body.event_types),
        created_at=now,
        updated_at=now,
        secrets=(SigningSecret(token_bytes(SECRET_BYTES)),),
    )
    stored = await context.webhook_endpoints.create(endpoint)
    log.info("webhook_created", tenant=stored.tenant, endpoint=stored.id)
    return render_json(webhook_bodies.endpoint_object(stored, with_secret=True))


def _check_url(context: GatewayContext, url: str) -> None:
    """Raise `BadRequest` if nothing would be sent to a URL, as far as its text tells."""
    try:
        target = parse_webhook_url(url)
        WebhookPolicy(context.settings.webhook_network).check_target(target)
    except ValueError as error:
        raise BadRequest(f"url {error}", "url") from None
    except WebhookRefused as refused:
        raise BadRequest(f"url names a host that may not be called: {refused}", "url") from None


async def _list(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    endpoints = (await context.webhook_endpoints.list_of(principal.tenant.name))[::-1]
    query = request.query_params
    page, has_more = cut_page(endpoints, webhook_bodies.endpoint_id, query, DEFAULT_PAGE, MAX_PAGE)
    data = [webhook_bodies.endpoint_object(endpoint) for endpoint in page]
    return render_json(page_body(data, has_more=has_more))


async def _show(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    endpoint = await find_endpoint(context, principal, request.path_params["endpoint"])
    return render_json(webhook_bodies.endpoint_object(endpoint))


async def _update(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    told = request.path_params["endpoint"]
    endpoint = await find_endpoint(context, principal, told)
    data = await read_body_in_time(request, context.settings.max_body_bytes)
    body = parse(UpdateWebhookEndpoint, decode(data or b"{}"))
    if body.url is not None:
        _check_url(context, body.url)
    now = int(context.broker.clock.now())
    changed = await context.webhook_endpoints.change(endpoint, lambda it: _updated(it, body, now))
    if changed is None:
        raise webhook_bodies.endpoint_not_found(told)
    log.info("webhook_changed", tenant=changed.tenant, endpoint=changed.id)
    return render_json(webhook_bodies.endpoint_object(changed))


def _updated(endpoint: WebhookEndpoint, body: UpdateWebhookEndpoint, now: int) -> WebhookEndpoint:
    """The endpoint with what a body asks for; it is as old as before if nothing changes."""
    changed = replace(
        endpoint,
        name=body.name or endpoint.name,
        url=body.url or endpoint.url,
        event_types=tuple(body.event_types or endpoint.event_types),
    )
    if body.enabled is not None:
        changed = changed.as_disabled("" if body.enabled else DISABLED_BY_CLIENT)
    return endpoint if changed == endpoint else replace(changed, updated_at=now)


async def _delete(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    endpoint = await find_endpoint(context, principal, request.path_params["endpoint"])
    await context.webhook_endpoints.change(endpoint, WebhookEndpoint.as_deleted)
    log.info("webhook_deleted", tenant=endpoint.tenant, endpoint=endpoint.id)
    return render_json(webhook_bodies.deleted_endpoint(endpoint))


async def _rotate(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "jobs")
    told = request.path_params["endpoint"]
    endpoint = await find_endpoint(context, principal, told)
    data = await read_body_in_time(request, context.settings.max_body_bytes)
    keeps_old = parse(
        RotateWebhookSecret, decode(data or b"{}")
    ).keep_old_secret_active_for_24_hours
    key, now = token_bytes(SECRET_BYTES), int(context.broker.clock.now())
    changed = await context.webhook_endpoints.change(
        endpoint, lambda it: it.rotated(key, now, keeps_old=keeps_old)
    )
    if changed is None:
        raise webhook_bodies.endpoint_not_found(told)
    log.info("webhook_secret_rotated", tenant=changed.tenant, endpoint=changed.id)
    return render_json(webhook_bodies.endpoint_object(changed, with_secret=True))

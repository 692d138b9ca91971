"""Bodies and ids of the webhook endpoints API, as the OpenAI SDK reads them. Pure."""

import re
from typing import Any

import orjson

from streams.errors import NotFound
from streams.records.webhooks.delivery_records import DeliveryAttempt, WebhookDelivery
from streams.records.webhooks.endpoint_records import WebhookEndpoint
from streams.records.webhooks.events import EventType
from streams.records.webhooks.signatures import SECRET_PREFIX, show_secret

_ENDPOINT = "we_"
_ID = re.compile(r"[0-9a-f]{24}\Z")
_HINT_CHARACTERS = 4


def endpoint_id(endpoint: WebhookEndpoint) -> str:
    """Return the id by which clients know an endpoint."""
    return f"{_ENDPOINT}{endpoint.id}"


def parse_endpoint_id(told: str) -> str:
    """Return the id of an endpoint's record; raises `NotFound` for what is no endpoint's id."""
    bare = told.removeprefix(_ENDPOINT)
    if bare == told or not _ID.match(bare):
        raise endpoint_not_found(told)
    return bare


def endpoint_not_found(told: str) -> NotFound:
    """Return the error for an id that names no endpoint of the tenant's."""
    return NotFound(f"there is no webhook endpoint {told!r}")


def event_types() -> dict[str, Any]:
    """Return the list of the types of events that there are."""
    return {"object": "list", "data": [kind.value for kind in EventType]}


def endpoint_object(endpoint: WebhookEndpoint, *, with_secret: bool = False) -> dict[str, Any]:
    """Return the `webhook_endpoint` object; with its secret when that is made, and never again.

    `status` and `disabled_reason` are ours.
    """
    secret = show_secret(endpoint.secrets[0].key)
    found = {
        "id": endpoint_id(endpoint),
        "object": "webhook_endpoint",
        "created_at": endpoint.created_at,
        "updated_at": endpoint.updated_at,
        "event_types": list(endpoint.event_types),
        "name": endpoint.name,
        "url": endpoint.url,
        "signing_secret_hint": f"{SECRET_PREFIX}***{secret[-_HINT_CHARACTERS:]}",
        "status": "disabled" if endpoint.disabled_reason else "enabled",
        "disabled_reason": endpoint.disabled_reason or None,
    }
    return found | {"signing_secret": secret} if with_secret else found


def deleted_endpoint(endpoint: WebhookEndpoint) -> dict[str, Any]:
    """Return what the SDK reads when an endpoint was deleted."""
    return {"id": endpoint_id(endpoint), "object": "webhook_endpoint.deleted", "deleted": True}


def test_result(endpoint: WebhookEndpoint, kind: str, status: int) -> dict[str, Any]:
    """Return what became of a test that was answered, with whatever status."""
    return {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": endpoint_id(endpoint),
        "event_type": kind,
        "status_code": status,
        "success": True,
    }


def delivery_id(delivery: WebhookDelivery) -> str:
    """Return the id of a delivery, which is its event's."""
    return delivery.event


def delivery_object(delivery: WebhookDelivery) -> dict[str, Any]:
    """Return a delivery with its last attempts; all of it is ours."""
    is_pending = delivery.status == "pending"
    return {
        "id": delivery_id(delivery),
        "object": "webhook_delivery",
        "webhook_endpoint_id": f"{_ENDPOINT}{delivery.endpoint}",
        "event_type": delivery.type,
        "created_at": delivery.created_at,
        "status": delivery.status.value,
        "is_test": delivery.is_test,
        "next_attempt_at": round(delivery.due_at) if is_pending else None,
        "attempts": [_attempt_object(each) for each in delivery.attempts],
        "event": orjson.loads(delivery.body),
    }


def _attempt_object(attempt: DeliveryAttempt) -> dict[str, Any]:
    return {
        "created_at": round(attempt.at, 3),
        "status_code": attempt.status,
        "error": attempt.error or None,
        "milliseconds": attempt.milliseconds,
    }

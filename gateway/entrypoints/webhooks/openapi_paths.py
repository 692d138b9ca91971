"""Operations of the webhook endpoints API, for the OpenAPI document. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

Operation = dict[str, Any]
Responses = Callable[[Iterable[int], dict[str, Any]], dict[str, Any]]
DEFAULT_PAGE, MAX_PAGE, MAX_DELIVERIES = 20, 100, 1000
_KEPT = (401, 403, 404, 429, 503)  # of every operation
_TEXT = {"type": "string"}


def build_paths(responses: Responses, reference: str) -> dict[str, Any]:
    """Return the operations by path and method.

    `responses` makes the responses of an operation of its error statuses; `reference` is a link to
    a schema, with `{model}` for its name.
    """

    def operation(summary: str, *errors: int, **more: Any) -> Operation:
        found = responses(sorted({*errors, *_KEPT}), {})
        return {"summary": summary, "responses": found, **more}

    def sending(summary: str, schema: str, *, required: bool = True, **more: Any) -> Operation:
        content = {"application/json": {"schema": {"$ref": reference.format(model=schema)}}}
        body = {"required": required, "content": content}
        return operation(summary, 400, 408, 413, 507, requestBody=body, **more)

    endpoint = [_path_parameter("endpoint")]
    delivery = [*endpoint, _path_parameter("event")]
    return {
        "/v1/webhook_event_types": {"get": operation("List the types of events")},
        "/v1/webhook_endpoints": {
            "post": sending("Create a webhook endpoint", "CreateWebhookEndpoint"),
            "get": operation("List the webhook endpoints", 400, parameters=_page(MAX_PAGE)),
        },
        "/v1/webhook_endpoints/{endpoint}": {
            "get": operation("Show a webhook endpoint", parameters=endpoint),
            "post": sending(
                "Change a webhook endpoint",
                "UpdateWebhookEndpoint",
                required=False,
                parameters=endpoint,
            ),
            "delete": operation("Delete a webhook endpoint", 507, parameters=endpoint),
        },
        "/v1/webhook_endpoints/{endpoint}/rotate_secret": {
            "post": sending(
                "Make a new signing secret",
                "RotateWebhookSecret",
                required=False,
                parameters=endpoint,
            )
        },
        "/v1/webhook_endpoints/{endpoint}/test": {
            "post": sending("Send a sample event", "TestWebhookEndpoint", parameters=endpoint)
        },
        "/v1/webhook_endpoints/{endpoint}/deliveries": {
            "get": operation(
                "List what was sent", 400, parameters=[*endpoint, *_page(MAX_DELIVERIES)]
            )
        },
        "/v1/webhook_endpoints/{endpoint}/deliveries/{event}/redeliver": {
            "post": operation("Send an event again", 507, parameters=delivery)
        },
    }


def _path_parameter(name: str) -> Operation:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _page(most: int) -> list[Operation]:
    limit = {"type": "integer", "minimum": 1, "maximum": most, "default": DEFAULT_PAGE}
    return [
        {"name": "limit", "in": "query", "schema": limit},
        {"name": "after", "in": "query", "schema": _TEXT},
    ]

"""Operations of the webhook endpoints API, for the OpenAPI document. Pure."""

from typing import Any

from gateway.entrypoints.openapi_operations import (
    Operation,
    OperationBuilder,
    page_parameters,
    path_parameter,
)

DEFAULT_PAGE, MAX_PAGE, MAX_DELIVERIES = 20, 100, 1000


def build_paths(build: OperationBuilder) -> dict[str, Any]:
    """Return the operations by path and method."""

    def sending(summary: str, schema: str, *, required: bool = True, **more: Any) -> Operation:
        body = build.json_body(schema, required=required)
        return build.operation(summary, 400, 408, 413, 507, requestBody=body, **more)

    endpoint = [path_parameter("endpoint")]
    delivery = [*endpoint, path_parameter("event")]
    return {
        "/v1/webhook_event_types": {"get": build.operation("List the types of events")},
        "/v1/webhook_endpoints": {
            "post": sending("Create a webhook endpoint", "CreateWebhookEndpoint"),
            "get": build.operation(
                "List the webhook endpoints",
                400,
                parameters=page_parameters(MAX_PAGE, DEFAULT_PAGE),
            ),
        },
        "/v1/webhook_endpoints/{endpoint}": {
            "get": build.operation("Show a webhook endpoint", parameters=endpoint),
            "post": sending(
                "Change a webhook endpoint",
                "UpdateWebhookEndpoint",
                required=False,
                parameters=endpoint,
            ),
            "delete": build.operation("Delete a webhook endpoint", 507, parameters=endpoint),
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
            "get": build.operation(
                "List what was sent",
                400,
                parameters=[*endpoint, *page_parameters(MAX_DELIVERIES, DEFAULT_PAGE)],
            )
        },
        "/v1/webhook_endpoints/{endpoint}/deliveries/{event}/redeliver": {
            "post": build.operation("Send an event again", 507, parameters=delivery)
        },
    }

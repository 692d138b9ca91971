"""Operations of stored responses, for the OpenAPI document. Pure."""

from typing import Any

from gateway.entrypoints.openapi_operations import (
    ORDER,
    TEXT,
    Operation,
    OperationBuilder,
    page_parameters,
    path_parameter,
    query_parameter,
)

MAX_PAGE = 100
_EVENTS = {"text/event-stream": {"schema": TEXT}}


def build_paths(build: OperationBuilder) -> dict[str, Any]:
    """Return the operations by path and method."""

    def operation(summary: str, *parameters: Operation, **more: Any) -> Operation:
        told = [path_parameter("response"), *parameters]
        return build.operation(summary, 400, 507, parameters=told, **more)

    response = "/v1/responses/{response}"
    return {
        response: {
            "get": operation(
                "Show a stored response, or stream its events",
                query_parameter("stream", {"enum": ["true", "false"]}),
                query_parameter("starting_after", {"type": "integer", "minimum": 0}),
                streams=_EVENTS,
            ),
            "delete": operation("Delete a stored response"),
        },
        f"{response}/cancel": {"post": operation("Cancel a background response")},
        f"{response}/input_items": {
            "get": operation(
                "List the items of a response's input",
                query_parameter("order", ORDER),
                *page_parameters(MAX_PAGE),
            )
        },
    }

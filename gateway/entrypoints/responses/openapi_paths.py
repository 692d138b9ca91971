"""Operations of stored responses, for the OpenAPI document. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

Operation = dict[str, Any]
Responses = Callable[[Iterable[int], dict[str, Any]], dict[str, Any]]
MAX_PAGE = 100
_ERRORS = (400, 401, 403, 404, 429, 503)
_PATH = {"name": "response", "in": "path", "required": True, "schema": {"type": "string"}}
_EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


def build_paths(responses: Responses) -> dict[str, Any]:
    """Return the operations by path and method.

    `responses` makes the responses of an operation of its error statuses.
    """

    def operation(summary: str, *parameters: Operation, **more: Any) -> Operation:
        told = {"summary": summary, "parameters": [_PATH, *parameters]}
        return {**told, "responses": responses((*_ERRORS, 507), more.get("streams", {}))}

    response = "/v1/responses/{response}"
    return {
        response: {
            "get": operation(
                "Show a stored response, or stream its events",
                _query("stream", {"enum": ["true", "false"]}),
                _query("starting_after", {"type": "integer", "minimum": 0}),
                streams=_EVENTS,
            ),
            "delete": operation("Delete a stored response"),
        },
        f"{response}/cancel": {"post": operation("Cancel a background response")},
        f"{response}/input_items": {
            "get": operation(
                "List the items of a response's input",
                _query("order", {"enum": ["asc", "desc"]}),
                _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
                _query("after", {"type": "string"}),
            )
        },
    }


def _query(name: str, schema: Operation) -> Operation:
    return {"name": name, "in": "query", "schema": schema}

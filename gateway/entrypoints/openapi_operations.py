"""Parts of operations in the OpenAPI document that several APIs share. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

Operation = dict[str, Any]
TEXT = {"type": "string"}
IDEMPOTENCY_KEY = {"name": "Idempotency-Key", "in": "header", "schema": TEXT}
ORDER = {"enum": ["asc", "desc"]}
_KEPT = (401, 403, 404, 429, 503)  # of every operation


class OperationBuilder:
    """Makes operations of their parts.

    `responses` makes the responses of an operation of its error statuses and of the content of a
    stream; `reference` is a link to a schema, with `{model}` for its name.
    """

    def __init__(
        self,
        responses: Callable[[Iterable[int], dict[str, Any]], dict[str, Any]],
        reference: str,
    ) -> None:
        self._responses, self._reference = responses, reference

    def operation(
        self, summary: str, *errors: int, streams: dict[str, Any] | None = None, **more: Any
    ) -> Operation:
        """Return an operation with error statuses beside those of all; `more` are its fields."""
        found = self._responses(sorted({*errors, *_KEPT}), streams or {})
        return {"summary": summary, "responses": found, **more}

    def json_body(self, schema: str, *, required: bool = True) -> Operation:
        """Return a JSON body of a schema's name."""
        content = {"application/json": {"schema": {"$ref": self._reference.format(model=schema)}}}
        return {"required": required, "content": content}


def path_parameter(name: str) -> Operation:
    """Return a parameter of the path."""
    return {"name": name, "in": "path", "required": True, "schema": TEXT}


def query_parameter(name: str, schema: Operation) -> Operation:
    """Return an optional parameter of the query."""
    return {"name": name, "in": "query", "schema": schema}


def page_parameters(most: int, default: int | None = None) -> list[Operation]:
    """Return the parameters of a list in pages of at most `most` entries."""
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    if default is not None:
        limit["default"] = default
    return [query_parameter("limit", limit), query_parameter("after", TEXT)]

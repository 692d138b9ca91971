"""Operations of the batches API, for the OpenAPI document. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

Operation = dict[str, Any]
Responses = Callable[[Iterable[int], dict[str, Any]], dict[str, Any]]
DEFAULT_PAGE, MAX_PAGE = 20, 100
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

    def json_body(schema: str, *, required: bool = True) -> Operation:
        content = {"application/json": {"schema": {"$ref": reference.format(model=schema)}}}
        return {"required": required, "content": content}

    sent, batch = (400, 408, 413, 500, 507), [_path_parameter("batch")]
    item = [*batch, _path_parameter("item")]
    results = operation("Read the results so far", 500, parameters=batch)
    results["responses"]["200"]["content"] = {"application/jsonl": {"schema": _TEXT}}
    changes = {
        "cancel": "End a batch, and keep what had ended",
        "pause": "Publish no further lines of a batch",
        "resume": "Go on with a paused batch",
    }
    return {
        "/v1/batches": {
            "post": operation("Create a batch", *sent, requestBody=json_body("CreateBatch")),
            "get": operation("List the batches", 400, parameters=_LIST_PARAMETERS),
        },
        "/v1/batches/estimate": {
            "post": operation(
                "Estimate what a batch may take", *sent, requestBody=json_body("EstimateBatch")
            )
        },
        "/v1/batches/{batch}": {"get": operation("Show a batch", parameters=batch)},
        **{
            f"/v1/batches/{{batch}}/{name}": {
                "post": operation(summary, 400, 507, parameters=batch)
            }
            for name, summary in changes.items()
        },
        "/v1/batches/{batch}/retry": {
            "post": operation(
                "Run the failed lines of a batch again",
                *sent,
                parameters=batch,
                requestBody=json_body("BatchOptions", required=False),
            )
        },
        "/v1/batches/{batch}/results": {"get": results},
        "/v1/batches/{batch}/items/{item}": {
            "get": operation("Show one line of a batch", 500, parameters=item)
        },
    }


def _path_parameter(name: str) -> Operation:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


_LIST_PARAMETERS = [
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    },
    {"name": "after", "in": "query", "schema": _TEXT},
]

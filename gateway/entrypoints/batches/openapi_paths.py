"""Operations of the batches API, for the OpenAPI document. Pure."""

from typing import Any

from gateway.entrypoints.openapi_operations import (
    IDEMPOTENCY_KEY,
    TEXT,
    OperationBuilder,
    page_parameters,
    path_parameter,
)

DEFAULT_PAGE, MAX_PAGE = 20, 100


def build_paths(build: OperationBuilder) -> dict[str, Any]:
    """Return the operations by path and method."""
    sent, batch = (400, 408, 413, 500, 507), [path_parameter("batch")]
    item = [*batch, path_parameter("item")]
    results = build.operation("Read the results so far", 500, parameters=batch)
    results["responses"]["200"]["content"] = {"application/jsonl": {"schema": TEXT}}
    changes = {
        "cancel": "End a batch, and keep what had ended",
        "pause": "Publish no further lines of a batch",
        "resume": "Go on with a paused batch",
    }
    return {
        "/v1/batches": {
            "post": build.operation(
                "Create a batch",
                *sent,
                409,
                parameters=[IDEMPOTENCY_KEY],
                requestBody=build.json_body("CreateBatch"),
            ),
            "get": build.operation(
                "List the batches", 400, parameters=page_parameters(MAX_PAGE, DEFAULT_PAGE)
            ),
        },
        "/v1/batches/estimate": {
            "post": build.operation(
                "Estimate what a batch may take",
                *sent,
                requestBody=build.json_body("EstimateBatch"),
            )
        },
        "/v1/batches/{batch}": {"get": build.operation("Show a batch", parameters=batch)},
        **{
            f"/v1/batches/{{batch}}/{name}": {
                "post": build.operation(summary, 400, 507, parameters=batch)
            }
            for name, summary in changes.items()
        },
        "/v1/batches/{batch}/retry": {
            "post": build.operation(
                "Run the failed lines of a batch again",
                *sent,
                parameters=batch,
                requestBody=build.json_body("BatchOptions", required=False),
            )
        },
        "/v1/batches/{batch}/results": {"get": results},
        "/v1/batches/{batch}/items/{item}": {
            "get": build.operation("Show one line of a batch", 500, parameters=item)
        },
    }

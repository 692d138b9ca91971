"""Operations of the files and uploads APIs, for the OpenAPI document. Pure."""

from typing import Any

from api.schemas.files import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS, PURPOSES
from gateway.entrypoints.openapi_operations import (
    ORDER,
    TEXT,
    Operation,
    OperationBuilder,
    page_parameters,
    path_parameter,
    query_parameter,
)

MAX_PAGE = 10_000


def build_paths(build: OperationBuilder) -> dict[str, Any]:
    """Return the operations by path and method."""
    stored, sent = (400, 408, 413, 415, 507), (400, 408, 413, 507)
    listing = [
        query_parameter("purpose", TEXT),
        query_parameter("order", ORDER),
        *page_parameters(MAX_PAGE),
    ]
    file, upload = [path_parameter("file")], [path_parameter("upload")]
    whole = build.operation("Read a file", 500, parameters=file)
    whole["responses"]["200"]["content"] = {"application/octet-stream": {"schema": TEXT}}
    return {
        "/v1/files": {
            "post": build.operation("Store a file", *stored, requestBody=_form(_FILE_FORM)),
            "get": build.operation("List the files", 400, parameters=listing),
        },
        "/v1/files/{file}": {
            "get": build.operation("Show a file", parameters=file),
            "delete": build.operation("Delete a file", 507, parameters=file),
        },
        "/v1/files/{file}/content": {"get": whole},
        "/v1/uploads": {
            "post": build.operation(
                "Begin a file", *sent, requestBody=build.json_body("CreateUpload")
            )
        },
        "/v1/uploads/{upload}/parts": {
            "post": build.operation(
                "Send a part of a file", *stored, parameters=upload, requestBody=_form(_PART_FORM)
            )
        },
        "/v1/uploads/{upload}/complete": {
            "post": build.operation(
                "Join the parts into a file",
                *sent,
                500,
                parameters=upload,
                requestBody=build.json_body("CompleteUpload"),
            )
        },
        "/v1/uploads/{upload}/cancel": {
            "post": build.operation("Give a file up", 400, 507, parameters=upload)
        },
    }


_FILE_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"enum": list(PURPOSES)},
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRY_SECONDS,
            "maximum": MAX_EXPIRY_SECONDS,
        },
    },
    "additionalProperties": False,
}
_PART_FORM = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "format": "binary", "minLength": 1}},
    "additionalProperties": False,
}


def _form(schema: Operation) -> Operation:
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}

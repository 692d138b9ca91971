"""Operations of the files and uploads APIs, for the OpenAPI document. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from api.schemas.files import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS, PURPOSES

Operation = dict[str, Any]
Responses = Callable[[Iterable[int], dict[str, Any]], dict[str, Any]]
MAX_PAGE = 10_000
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

    def json_body(schema: str) -> Operation:
        content = {"application/json": {"schema": {"$ref": reference.format(model=schema)}}}
        return {"required": True, "content": content}

    stored, sent = (400, 408, 413, 415, 507), (400, 408, 413, 507)
    file, upload = [_path_parameter("file")], [_path_parameter("upload")]
    whole = operation("Read a file", 500, parameters=file)
    whole["responses"]["200"]["content"] = {"application/octet-stream": {"schema": _TEXT}}
    return {
        "/v1/files": {
            "post": operation("Store a file", *stored, requestBody=_form(_FILE_FORM)),
            "get": operation("List the files", 400, parameters=_LIST_PARAMETERS),
        },
        "/v1/files/{file}": {
            "get": operation("Show a file", parameters=file),
            "delete": operation("Delete a file", 507, parameters=file),
        },
        "/v1/files/{file}/content": {"get": whole},
        "/v1/uploads": {
            "post": operation("Begin a file", *sent, requestBody=json_body("CreateUpload"))
        },
        "/v1/uploads/{upload}/parts": {
            "post": operation(
                "Send a part of a file", *stored, parameters=upload, requestBody=_form(_PART_FORM)
            )
        },
        "/v1/uploads/{upload}/complete": {
            "post": operation(
                "Join the parts into a file",
                *sent,
                500,
                parameters=upload,
                requestBody=json_body("CompleteUpload"),
            )
        },
        "/v1/uploads/{upload}/cancel": {
            "post": operation("Give a file up", 400, 507, parameters=upload)
        },
    }


def _path_parameter(name: str) -> Operation:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _query_parameter(name: str, schema: Operation) -> Operation:
    return {"name": name, "in": "query", "schema": schema}


_LIST_PARAMETERS = [
    _query_parameter("purpose", _TEXT),
    _query_parameter("order", {"enum": ["asc", "desc"]}),
    _query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
    _query_parameter("after", _TEXT),
]
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

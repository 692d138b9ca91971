"""The OpenAPI document of the admin API, generated from the table of operations. Pure."""

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from admin.operation_table import OPERATIONS, Operation
from api.error_bodies import ERROR_SCHEMA

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The arguments are wrong",
    401: "No key, or one that does not open the admin API (any more)",
    403: "The key lacks the scope that this needs, or may not be used from this address",
    404: "There is no such record",
    409: "Another record, or the configuration file, stands against it",
    413: "The body is too large",
    429: "Too many wrong keys came from this address; see Retry-After",
    500: "The service failed; its log says why",
    503: "The broker does not answer; see Retry-After",
}


@cache
def build_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the admin API, as a JSON object that nobody may change."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": ERROR_SCHEMA}
    for operation in OPERATIONS.values():
        own, definitions = _schema(operation)
        schemas |= definitions
        paths.setdefault(operation.documented_path, {})[operation.method.lower()] = _describe(
            operation, own
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millstream admin", "version": version("millstream")},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schema(operation: Operation) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of an operation's arguments, and those of the records in it by name."""
    _, found = models_json_schema([(operation.arguments, "validation")], ref_template=_REF)
    definitions = dict(found["$defs"])
    own = definitions.pop(operation.arguments.__name__)
    return _without_flags(own), _without_flags(definitions)


def _without_flags(schema: Any) -> Any:
    """Take out what the command line alone needs to know of a field."""
    if isinstance(schema, dict):
        return {k: _without_flags(v) for k, v in schema.items() if k != "flag_only"}
    return [_without_flags(each) for each in schema] if isinstance(schema, list) else schema


def _describe(operation: Operation, schema: dict[str, Any]) -> dict[str, Any]:
    fields, in_path = schema["properties"], operation.path_arguments
    others = {name: field for name, field in fields.items() if name not in in_path}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "security": [{"key": [operation.scope]}],
        "parameters": [_parameter(name, fields[name], "path") for name in in_path],
        "responses": _responses(),
    }
    if operation.has_body:
        required = [name for name in schema.get("required", ()) if name in others]
        body = {
            "type": "object",
            "properties": others,
            "required": required,
            "additionalProperties": False,
        }
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    else:
        described["parameters"] += [_parameter(*each, "query") for each in others.items()]
    return described


def _parameter(name: str, schema: dict[str, Any], place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _responses() -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    whole = {"application/json": {"schema": {"type": "object"}}}
    return {
        "200": {"description": "The record, once it is stored", "content": whole},
        **{str(code): {"description": text, "content": error} for code, text in _ERRORS.items()},
    }

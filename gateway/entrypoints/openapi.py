"""The OpenAPI document, generated from the pydantic records that check the bodies."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from api.error_bodies import ERROR_SCHEMA
from api.messages import message_errors
from api.messages.message_request import MessagesRequest, PromptBody
from api.schemas.batches import BatchOptions, CreateBatch, EstimateBatch
from api.schemas.classify_rerank import ClassifyRequest, RerankRequest
from api.schemas.completions import ChatRequest, CompletionRequest
from api.schemas.embeddings import EmbeddingRequest
from api.schemas.fields import Body
from api.schemas.files import CompleteUpload, CreateUpload
from api.schemas.responses import ResponseRequest
from api.schemas.webhooks import (
    CreateWebhookEndpoint,
    RotateWebhookSecret,
    TestWebhookEndpoint,
    UpdateWebhookEndpoint,
)
from gateway.entrypoints.batches import openapi_paths as batch_paths
from gateway.entrypoints.files import openapi_paths as file_paths
from gateway.entrypoints.openapi_operations import IDEMPOTENCY_KEY, OperationBuilder
from gateway.entrypoints.responses import openapi_paths as response_paths
from gateway.entrypoints.usage import PARAMETERS
from gateway.entrypoints.webhooks import openapi_paths as webhook_paths

_REF = "#/components/schemas/{model}"
_POSTS: dict[str, tuple[str, type[Body]]] = {
    "/v1/chat/completions": ("Answer a chat", ChatRequest),
    "/v1/completions": ("Continue a text", CompletionRequest),
    "/v1/responses": ("Answer with a response that is stored", ResponseRequest),
    "/v1/embeddings": ("Embed texts", EmbeddingRequest),
    "/v1/classify": ("Classify texts", ClassifyRequest),
    "/v1/rerank": ("Order documents by relevance to a query", RerankRequest),
    "/rerank": ("The same as /v1/rerank, where some clients look for it", RerankRequest),
}
_MESSAGES: dict[str, tuple[str, type[Body]]] = {
    "/v1/messages": ("Answer a conversation in Anthropic's shape", MessagesRequest),
    "/v1/messages/count_tokens": ("Count the tokens of a conversation", PromptBody),
}
_ERRORS = {
    400: "The request cannot be served as it is",
    401: "No API key, or an unknown one",
    403: "The key may not do this",
    404: "There is no such thing",
    408: "The body did not come in time",
    409: "The idempotency key was used with a different request",
    413: "The body is too large",
    415: "The body has a Content-Encoding that is not supported",
    429: "The tenant has as much queued, open or used as it may; see Retry-After",
    431: "The head of the request is too large",
    499: "The request was cancelled",
    500: "The request failed",
    502: "The server that runs this model failed",
    503: "Overloaded, or the broker is unreachable; see Retry-After",
    504: "The deadline passed",
}
_FILE_ERRORS = {507: "There is no room for further files or results"}
_MESSAGE_ERRORS = {529: "Overloaded; see Retry-After"}


def build_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of this gateway's HTTP API, as a JSON object."""
    posts = [*_POSTS.values(), *_MESSAGES.values()]
    bodies = [*(schema for _, schema in posts), CreateUpload, CompleteUpload]
    bodies += [CreateBatch, EstimateBatch, BatchOptions]
    bodies += [CreateWebhookEndpoint, UpdateWebhookEndpoint]
    bodies += [RotateWebhookSecret, TestWebhookEndpoint]
    schemas = [(schema, "validation") for schema in bodies]
    _, definitions = models_json_schema(schemas, ref_template=_REF)  # type: ignore[arg-type]
    build = OperationBuilder(_responses, _REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millstream", "version": version("millstream")},
        "security": [{"key": []}],
        "paths": {
            **{path: {"post": _post_operation(*each)} for path, each in _POSTS.items()},
            **{path: {"post": _messages_operation(*each)} for path, each in _MESSAGES.items()},
            "/v1/models": {"get": _get_operation("List the models", [401])},
            "/v1/models/{model}": {"get": _get_operation("Show a model", [401, 404], "model")},
            "/v1/usage": {"get": _usage_operation()},
            **file_paths.build_paths(build),
            **batch_paths.build_paths(build),
            **response_paths.build_paths(build),
            **webhook_paths.build_paths(build),
            "/healthz": {"get": _get_operation("The process is alive", [], public=True)},
            "/health": {"get": _get_operation("The process is alive", [], public=True)},
            "/version": {"get": _get_operation("Tell the version", [], public=True)},
            "/readyz": {"get": _get_operation("It can serve requests", [503], public=True)},
        },
        "components": {
            "schemas": {
                **definitions["$defs"],
                "Error": ERROR_SCHEMA,
                "MessagesError": message_errors.ERROR_SCHEMA,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post_operation(summary: str, schema: type[Body]) -> dict[str, Any]:
    reference = {"$ref": _REF.format(model=schema.__name__)}
    last = {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}}
    errors = [*_ERRORS, *(_FILE_ERRORS if schema is ResponseRequest else ())]
    return {
        "summary": summary,
        "parameters": [IDEMPOTENCY_KEY, last],
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": _responses(errors, {"text/event-stream": {"schema": {"type": "string"}}}),
    }


def _messages_operation(summary: str, schema: type[Body]) -> dict[str, Any]:
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    responses = _responses({**_ERRORS, **_MESSAGE_ERRORS}, stream, "MessagesError")
    return {**_post_operation(summary, schema), "responses": responses}


def _usage_operation() -> dict[str, Any]:
    text = {"type": "string"}
    parameters = [
        {"name": name, "in": "query", "description": description, "schema": text}
        for name, description in PARAMETERS.items()
    ]
    operation = _get_operation("Tell what the key's tenant has used", [400, 401, 503])
    return {**operation, "parameters": parameters}


def _get_operation(
    summary: str, errors: Iterable[int], parameter: str | None = None, public: bool = False
) -> dict[str, Any]:
    named = {"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "summary": summary,
        "parameters": [named] if parameter else [],
        "responses": _responses(errors, {}),
        **({"security": []} if public else {}),
    }


def _responses(
    errors: Iterable[int], streams: dict[str, Any], error_schema: str = "Error"
) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF.format(model=error_schema)}}}
    whole = {"application/json": {"schema": {"type": "object"}}}
    return {
        "200": {"description": "The answer", "content": whole | streams},
        **{
            str(code): {
                "description": (_ERRORS | _FILE_ERRORS | _MESSAGE_ERRORS)[code],
                "content": error,
            }
            for code in errors
        },
    }

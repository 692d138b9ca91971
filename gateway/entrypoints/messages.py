"""Serves Anthropic's /v1/messages and /v1/messages/count_tokens: chats in other words."""

from collections.abc import Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Send

from api.authentication.authenticator import Principal
from api.endpoints.completion_endpoint import CHAT
from api.error_bodies import retry_headers
from api.messages import message_errors
from api.messages.message_answer import MessageFormat
from api.messages.message_request import MessagesRequest, PromptBody
from api.submission.submission_record import Submission
from gateway.context import GatewayContext
from gateway.entrypoints import completions
from gateway.entrypoints.endpoint import Endpoint
from gateway.entrypoints.http_middleware import REQUEST_ID
from gateway.entrypoints.plain_responses import render_json
from streams.errors import MillstreamError

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the routes of both paths."""
    create = Endpoint(context, MessagesRequest, _to_submissions, _serve, render_error)
    count = Endpoint(context, PromptBody, _to_submissions, _serve_count, render_error)
    return [Route(COUNT_PATH, count, methods=["POST"]), Route(PATH, create, methods=["POST"])]


def _to_submissions(body: PromptBody) -> list[Submission]:
    return CHAT.to_submissions(body.chat)


async def _serve(
    context: GatewayContext,
    request: Request,
    principal: Principal,
    body: MessagesRequest,
    submissions: Sequence[Submission],
    send: Send,
) -> Response | None:
    return await completions.serve(
        MessageFormat(), context, request, principal, body.chat, submissions, send
    )


async def _serve_count(
    context: GatewayContext,
    request: Request,
    principal: Principal,
    body: PromptBody,
    submissions: Sequence[Submission],
    send: Send,
) -> Response:
    count = await context.validator.count_prompt_tokens(principal.tenant, submissions[0])
    return render_json({"input_tokens": count})


def is_at(path: str) -> bool:
    """Return whether a path is one of these, or below them, where nothing else is."""
    return path == PATH or path.startswith(f"{PATH}/")


def render_error(request: Request, error: MillstreamError) -> Response:
    """Return the HTTP response for an error, in Anthropic's shape."""
    return Response(
        orjson.dumps(message_errors.error_body(error, request.scope["state"][REQUEST_ID])),
        message_errors.error_status(error),
        headers=retry_headers(error),
        media_type="application/json",
    )

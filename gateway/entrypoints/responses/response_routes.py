"""Stored responses: show, stream, cancel and delete them, and list the items of their input."""

import asyncio
from functools import partial

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from api.openai_bodies import JsonBody, page_body
from api.responses.conversation import find_model, head_of
from api.responses.response_bodies import (
    ResponseEnd,
    check_cancellable,
    input_item_objects,
    parse_response_id,
    response_not_found,
    response_object,
)
from api.responses.stored_events import result_object
from gateway import error_responses
from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import request_key
from gateway.entrypoints.plain_responses import cut_page, render_json
from gateway.entrypoints.responses.openapi_paths import MAX_PAGE
from gateway.entrypoints.responses.response_stream import EventWriter
from gateway.entrypoints.responses.stored_stream import StoredStream, end_without_result
from gateway.replies.record_queue import ClientGone
from streams import messages, subjects, topology
from streams.errors import BadRequest, MillstreamError
from streams.records.jobs.item_results import CANCELLED
from streams.records.responses.response_records import StoredResponse

log = structlog.get_logger()

DEFAULT_PAGE = 20
CANCEL_SECONDS, LOOK_SECONDS = 5.0, 0.05  # for which a cancellation is waited for


def build_routes(context: GatewayContext) -> list[BaseRoute]:
    """Return the routes of stored responses."""
    response = "/v1/responses/{response}"
    return [
        Route(response, partial(_delete, context), methods=["DELETE"]),
        Route(response, _ShowApp(context), methods=["GET"]),
        Route(f"{response}/cancel", partial(_cancel, context), methods=["POST"]),
        Route(f"{response}/input_items", partial(_list_input, context), methods=["GET"]),
    ]


async def _find(context: GatewayContext, tenant: str, request: Request) -> StoredResponse:
    told = request.path_params["response"]
    found = await context.responses.find(tenant, parse_response_id(told))
    if found is None:
        raise response_not_found(told)
    return found


class _ShowApp:
    """Shows a response as an object, or with `stream=true` as the events after `starting_after`."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._answer(request, send)
        except ClientGone:
            log.info("client_left", path=scope["path"])
            return
        except MillstreamError as error:
            answer = error_responses.error_response(error)
        if answer:
            await answer(scope, receive, send)

    async def _answer(self, request: Request, send: Send) -> Response | None:
        context = self._context
        principal = await context.authenticate(request_key(request), request.scope, "infer")
        with context.connection_limits.admit(principal.tenant):
            response = await _find(context, principal.tenant.name, request)
            if not _flag(request, "stream"):
                return render_json(await _current_object(context, response))
            context.check_not_draining()
            writer = EventWriter(send, _starting_after(request))
            await StoredStream(context, response, writer).run(request, principal)
            return None


def _flag(request: Request, name: str) -> bool:
    told = request.query_params.get(name, "false")
    if told not in ("true", "false"):
        raise BadRequest(f"{name} is {told!r}, not true or false", name)
    return told == "true"


def _starting_after(request: Request) -> int:
    told = request.query_params.get("starting_after")
    if told is None:
        return -1
    if not (told.isascii() and told.isdecimal()) or len(told) > 12:
        raise BadRequest(
            f"starting_after is {told!r}, not the sequence_number of an event", "starting_after"
        )
    return int(told)


async def _current_object(context: GatewayContext, response: StoredResponse) -> JsonBody:
    """Return a response as it is now."""
    head = head_of(response)
    if result := await context.responses.find_result(response):
        return result_object(head, find_model(context.registry, head), result)
    end = end_without_result(response, context.broker.clock.now())
    if end is None and response.is_cancelled:
        end = ResponseEnd(CANCELLED)
    if end is None:
        has_begun = not response.background or await _has_begun(context, response)
        end = ResponseEnd("in_progress" if has_begun else "queued")
    return response_object(head, end)


async def _has_begun(context: GatewayContext, response: StoredResponse) -> bool:
    """Return whether a worker has begun the response, as its log says."""
    shards = context.settings.shards
    stream = topology.token_stream_of(response.request_id, shards)
    log = subjects.log_on_any_route(response.tenant, response.request_id, shards)
    found = await context.broker.read(stream, {"next_by_subj": log, "seq": 1})
    return bool(found) and messages.unpack(found[0].data)["type"] == "started"


async def _cancel(context: GatewayContext, request: Request) -> Response:
    """Cancel a background response, and wait a little until it has ended; idempotent."""
    principal = await context.authenticate(request_key(request), request.scope, "infer")
    response = await _find(context, principal.tenant.name, request)
    check_cancellable(head_of(response))
    if await context.responses.find_result(response) is None:
        told = request.path_params["response"]
        changed = await context.responses.change(response, StoredResponse.as_cancelled)
        if changed is None:
            raise response_not_found(told)
        await context.responses.tell(changed)
        log.info("response_cancelled", tenant=changed.tenant, response=changed.id)
        response = changed
        await _wait_for_result(context, response)
    return render_json(await _current_object(context, response))


async def _wait_for_result(context: GatewayContext, response: StoredResponse) -> None:
    until = asyncio.get_running_loop().time() + CANCEL_SECONDS
    while await context.responses.find_result(response) is None:
        if asyncio.get_running_loop().time() >= until:
            return
        await asyncio.sleep(LOOK_SECONDS)


async def _delete(context: GatewayContext, request: Request) -> Response:
    """Delete a response: it is gone at once, and its bytes are removed by the jobs services."""
    principal = await context.authenticate(request_key(request), request.scope, "infer")
    response = await _find(context, principal.tenant.name, request)
    deleted = await context.responses.change(response, StoredResponse.as_deleted)
    if deleted:
        await context.responses.mark_pending(deleted)
    log.info("response_deleted", tenant=response.tenant, response=response.id)
    told = request.path_params["response"]
    return render_json({"id": told, "object": "response", "deleted": True})


async def _list_input(context: GatewayContext, request: Request) -> Response:
    principal = await context.authenticate(request_key(request), request.scope, "infer")
    response = await _find(context, principal.tenant.name, request)
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order is {order!r}, not 'asc' or 'desc'", "order")
    items = input_item_objects(head_of(response))
    ordered = items if order == "asc" else items[::-1]
    page, has_more = cut_page(ordered, lambda item: str(item["id"]), query, DEFAULT_PAGE, MAX_PAGE)
    return render_json(page_body(page, has_more=has_more))

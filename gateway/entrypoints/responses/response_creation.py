"""Creates responses: answered whole, streamed, or left to the jobs services in the background."""

import secrets
from functools import partial

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from api.authentication.authenticator import Principal
from api.endpoints.completion_endpoint import CHAT, make_tool_parser
from api.openai_bodies import JsonBody
from api.responses.chat_translation import to_chat
from api.responses.conversation import head_of, read_earlier
from api.responses.response_bodies import ResponseEnd, ResponseHead, response_object
from api.responses.response_events import ResponseEvents
from api.responses.truncation import fit_chat
from api.schemas.completions import ChatRequest
from api.schemas.responses import ResponseRequest
from api.submission.submission_record import Submission
from gateway.context import GatewayContext
from gateway.entrypoints.choice_fanout import ChoiceFanout, submit_choices
from gateway.entrypoints.endpoint import json_response
from gateway.entrypoints.plain_responses import render_json
from gateway.entrypoints.responses.response_stream import EventWriter, pinging
from gateway.entrypoints.responses.stored_stream import StoredStream
from streams.errors import Ended, PayloadTooLarge
from streams.headers import MAX_HEADER_BYTES
from streams.messages import Record
from streams.records.cas.cas_records import RecordChanged
from streams.records.responses.response_records import StoredResponse

log = structlog.get_logger()

_DAY = 86_400


def to_submissions(body: ResponseRequest) -> list[Submission]:
    """Return none: the conversation that a response continues is read first."""
    return []


async def serve(
    context: GatewayContext,
    request: Request,
    principal: Principal,
    body: ResponseRequest,
    _: list[Submission],
    send: Send,
) -> Response | None:
    """Answer one request: return the whole response, or send a stream with `send` and return None.

    A response that is stored can be read at any gateway before its client is told of it.
    """
    if body.is_stored:
        context.response_space.check()
    tenant, data = principal.tenant.name, _pack_body(context, body)
    earlier = await read_earlier(context.responses, context.registry, tenant, body)
    if body.truncation == "auto":
        validate = partial(context.validator.validate, principal.tenant)
        chat = await fit_chat(body, earlier, validate)
    else:
        chat = await context.offload_thread.run(len(data), to_chat, body, earlier)
    (submission,) = CHAT.to_submissions(chat)
    if body.background:
        await context.validator.validate(principal.tenant, submission)
        return await _serve_background(context, request, principal, body, data, send)
    async with submit_choices(
        context, request, principal, submission, stores_result=body.is_stored
    ) as fanout:
        record = _make_record(context, principal, body, data, fanout.ticket.request_id)
        head = await _store(context, record) if body.is_stored else head_of(record)
        answer = _Answer(head, chat, fanout)
        if not body.stream:
            return await answer.respond_whole()
        await fanout.await_first_output()
        await answer.stream(EventWriter(send))
        return None


def _pack_body(context: GatewayContext, body: ResponseRequest) -> bytes:
    """Return a body as it is stored; raises `PayloadTooLarge` if no record can hold it."""
    data = orjson.dumps(body.model_dump(by_alias=True, exclude_unset=True))
    limit = context.broker.max_payload - MAX_HEADER_BYTES
    if body.is_stored and len(data) > limit:
        raise PayloadTooLarge(len(data), limit)
    return data


def _make_record(
    context: GatewayContext,
    principal: Principal,
    body: ResponseRequest,
    data: bytes,
    response_id: str,
) -> StoredResponse:
    now, settings = context.broker.clock.now(), context.settings
    seconds = settings.max_deadline_seconds
    if body.deadline_ms:
        seconds = min(seconds, body.deadline_ms / 1000)
    return StoredResponse(
        tenant=principal.tenant.name,
        id=response_id,
        body=data,
        created_at=int(now),
        expires_at=int(now + settings.response_days * _DAY),
        ends_at=now + seconds,
        key=principal.key.model_dump_json(),
        background=bool(body.background),
    )


async def _store(context: GatewayContext, record: StoredResponse) -> ResponseHead:
    """Store the record of a response whose request was accepted, unless it is there already."""
    try:
        return head_of(await context.responses.create(record))
    except RecordChanged as conflict:  # the same idempotency key again
        return head_of(conflict.newer or record)


async def _serve_background(
    context: GatewayContext,
    request: Request,
    principal: Principal,
    body: ResponseRequest,
    data: bytes,
    send: Send,
) -> Response | None:
    """Store a response for the jobs services to run, and answer at once or with its stream."""
    context.check_not_draining()
    principal.check("infer")
    record = _make_record(context, principal, body, data, secrets.token_hex(16))
    record = await context.responses.create(record)
    await context.responses.mark_pending(record)
    log.info("response_created", tenant=record.tenant, response=record.id)
    if not body.stream:
        return render_json(response_object(head_of(record), ResponseEnd("queued")))
    await StoredStream(context, record, EventWriter(send)).run(request, principal)
    return None


class _Answer:
    """The answer to a response that runs while its client waits."""

    def __init__(self, head: ResponseHead, chat: ChatRequest, fanout: ChoiceFanout) -> None:
        self._head, self._fanout = head, fanout
        version = fanout.ticket.version
        self._events = ResponseEvents(head, make_tool_parser(chat, version, head.id))

    async def respond_whole(self) -> Response:
        """Return the response object; raises `Ended` if the request failed."""
        end = None
        while end is None:
            record = await self._fanout.next()
            _, end = self._encode(record)
        answer = response_object(self._head, end, self._events.output)
        return json_response(answer, self._fanout.ticket, record["timing"])

    async def stream(self, writer: EventWriter) -> None:
        """Send all events; a failure is the last one. Raises `ClientGone` if the client leaves."""
        await writer.begin()
        async with pinging(writer):
            await writer.write([*self._events.created(), *self._events.started()])
            try:
                await self._send_records(writer)
            except Ended as error:
                end = ResponseEnd.from_failure(error.code, error.message)
                await writer.write(self._events.end(end))
        await writer.end()

    async def _send_records(self, writer: EventWriter) -> None:
        while not self._fanout.is_ended:
            records = [await self._fanout.next(), *self._fanout.next_ready()]
            await writer.write([e for record in records for e in self._encode(record)[0]])

    def _encode(self, record: Record) -> tuple[list[JsonBody], ResponseEnd | None]:
        if record["type"] == "chunk":
            return self._events.chunk(record["count"], record["text"], record.get("logprobs")), None
        if record["type"] == "done":
            end = ResponseEnd.from_finish(record["finish_reason"], record["usage"])
            return self._events.end(end), end
        return [], None

"""/v1/completions and /v1/chat/completions, streamed and whole."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from api import openai_bodies, sse
from api.openai_bodies import FinishReason, JsonBody, Logprobs, Usage, total_usage
from api.schemas.completions import ChatRequest, CompletionRequest
from api.schemas.tools import NamedToolChoice
from api.submission.submission import Submission
from api.tool_calls import (
    FORCED_CALLS,
    ToolCallFormat,
    ToolParser,
    detect_format,
    forced_function_format,
)
from gateway.admission.submitter import Ticket
from gateway.context import GatewayContext
from gateway.entrypoints.endpoint import collect_stages, format_server_timing, json_response
from gateway.entrypoints.http_request import HttpRequest, submit_http_request
from registry.models import Model
from registry.tenant_records import Tenant
from streams.errors import Ended
from streams.messages import Record

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats have the model's
PING_INTERVAL_SECONDS = 7.5  # what was silent for so long is pinged before it was for twice as long


CompletionBody = CompletionRequest | ChatRequest


@dataclass(frozen=True)
class CompletionEndpoint:
    """In what one endpoint differs from the other."""

    schema: type[CompletionRequest] | type[ChatRequest]
    build_body: Callable[[str, str, int, Sequence[JsonBody], Usage], JsonBody]
    build_choice: Callable[[int, str, FinishReason, Logprobs | None], JsonBody]
    events_class: type[sse.CompletionEvents] | type[sse.ChatEvents]
    default_max_tokens: int | None

    def to_submissions(self, body: CompletionBody) -> list[Submission]:
        """One for each prompt of a body."""
        return Submission.all_from_body(body, self.default_max_tokens)


COMPLETION = CompletionEndpoint(
    CompletionRequest,
    openai_bodies.completion,
    openai_bodies.completion_choice,
    sse.CompletionEvents,
    DEFAULT_COMPLETION_TOKENS,
)
CHAT = CompletionEndpoint(
    ChatRequest, openai_bodies.chat_completion, openai_bodies.chat_choice, sse.ChatEvents, None
)


async def serve(
    shape: CompletionEndpoint,
    door: GatewayContext,
    request: Request,
    tenant: Tenant,
    body: CompletionBody,
    submissions: Sequence[Submission],
    send: Send,
) -> Response | None:
    """Answer one request: whole as a response, or streamed through `send`."""
    async with submit_http_request(door, request, tenant, *submissions) as running:
        if not body.stream:
            return await _respond_whole(shape, running, body)
        await running.await_first_record()
        await CompletionStream(shape, running, body, send).run()
        return None


def _tool_parser(body: CompletionBody, ticket: Ticket) -> ToolParser | None:
    """What finds the calls in a choice's text, if it may have any."""
    if not isinstance(body, ChatRequest) or not body.offered_tools:
        return None
    form = _tool_call_format(body, ticket.model)
    assert form, "checked on admission"
    return ToolParser(form, ticket.request_id, body.parallel_tool_calls is not False)


def _tool_call_format(body: ChatRequest, model: Model) -> ToolCallFormat | None:
    """How the calls in an answer will be written."""
    if isinstance(body.tool_choice, NamedToolChoice):
        return forced_function_format(body.tool_choice.name)
    return FORCED_CALLS if body.forces_tools else detect_format(model.chat_template)


@dataclass
class ChoiceOutput:
    """What one choice has said so far, and its last record."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    last: Record = field(default_factory=dict)

    def add_record(self, record: Record) -> None:
        self.texts.append(record.get("text", ""))
        self.logprobs += record.get("logprobs", ())
        self.last = record


async def _respond_whole(
    shape: CompletionEndpoint, running: HttpRequest, body: CompletionBody
) -> Response:
    said = [ChoiceOutput() for _ in running.tickets]
    while not running.is_ended:
        record = await running.next()
        said[record["choice"]].add_record(record)
    choices = [
        _build_choice(shape, body, ticket, index, each)
        for index, (ticket, each) in enumerate(zip(running.tickets, said, strict=True))
    ]
    usage = total_usage([each.last["usage"] for each in said], body.choice_count)
    request_id = running.ticket.request_id
    answer = shape.build_body(request_id, body.model, int(time.time()), choices, usage)
    return json_response(answer, running.ticket, record["timing"])


def _build_choice(
    shape: CompletionEndpoint, body: CompletionBody, ticket: Ticket, index: int, said: ChoiceOutput
) -> JsonBody:
    text, reason = "".join(said.texts), said.last["finish_reason"]
    logprobs = said.logprobs if body.requested_logprobs is not None else None
    if parser := _tool_parser(body, ticket):
        found, rest = parser.push(text), parser.finish()
        calls = found.calls + rest.calls
        return openai_bodies.chat_choice(index, found.text + rest.text, reason, logprobs, calls)
    return shape.build_choice(index, text, reason, logprobs)


class CompletionStream:
    """Server-sent events of one request; what is there at once is sent at once."""

    def __init__(
        self, shape: CompletionEndpoint, running: HttpRequest, body: CompletionBody, send: Send
    ) -> None:
        self._request, self._body, self._send = running, body, send
        self._usages: dict[int, Usage] = {}
        self._is_silent = True
        self._created = int(time.time())
        self._events = [
            self._choice_events(shape, ticket, index)
            for index, ticket in enumerate(running.tickets)
        ]

    def _choice_events(
        self, shape: CompletionEndpoint, ticket: Ticket, index: int
    ) -> sse.ChoiceEvents:
        body = self._body
        head = (self._request.ticket.request_id, body.model, self._created)
        if parser := _tool_parser(body, ticket):
            return sse.ToolCallEvents(parser, *head, index, body.include_usage)
        return shape.events_class(*head, index, body.include_usage)

    async def run(self) -> None:
        """Send it to its end; an error that comes after the headers is the last event."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        await self._write(b"".join(events.opening() for events in self._events))
        async with asyncio.TaskGroup() as tasks:
            pinging = tasks.create_task(self._ping(), name="ping")
            await self._send_records()
            pinging.cancel()

    async def _send_records(self) -> None:
        try:
            while not await self._send_next():
                pass
        except Ended as error:
            await self._write(sse.error_event(error), last=True)

    async def _ping(self) -> None:
        # a timeout around each wait for a record would cost a tenth of what a stream does
        while True:
            self._is_silent = True
            await asyncio.sleep(PING_INTERVAL_SECONDS)
            if self._is_silent:
                await self._write(sse.PING)

    async def _send_next(self) -> bool:
        """Send the next records; True once the last one was among them."""
        records = [await self._request.next(), *self._request.next_ready()]
        ended = self._request.is_ended
        data = b"".join(map(self._encode_record, records))
        await self._write(data + self._encode_end() if ended else data, last=ended)
        return ended

    def _encode_record(self, record: Record) -> bytes:
        events = self._events[record["choice"]]
        if record["type"] == "chunk":
            return events.text(record["text"], record.get("logprobs"))
        if record["type"] == "done":
            self._usages[record["choice"]] = record["usage"]
            return events.finish(record["finish_reason"])
        return b""

    def _encode_end(self) -> bytes:
        """What follows the last choice's end."""
        if not self._body.include_usage:
            return sse.DONE
        usages = [self._usages[index] for index in range(len(self._events))]
        return self._events[0].usage(total_usage(usages, self._body.choice_count)) + sse.DONE

    async def _write(self, data: bytes, last: bool = False) -> None:
        if not data and not last:
            return
        self._is_silent = False
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        ticket = self._request.ticket
        return [
            (b"content-type", sse.MEDIA_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", ticket.request_id.encode()),
            (b"server-timing", format_server_timing(collect_stages(ticket, {})).encode()),
        ]

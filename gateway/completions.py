"""/v1/completions and /v1/chat/completions, streamed and whole."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from gateway import answers, sse
from gateway.answers import Answer, FinishReason, Logprobs, Usage, total_usage
from gateway.door import Door
from gateway.endpoint import json_response, server_timing, stage_header
from gateway.exchange import Exchange, exchange
from gateway.following import Record
from gateway.intake import Ticket
from gateway.schemas.completions import ChatRequest, CompletionRequest
from gateway.schemas.tools import Named
from gateway.submission import Submission
from gateway.tool_calls import FORCED, Format, ToolParser, forced_to, written_by
from registry.models import Model
from registry.tenants import Tenant
from streams.errors import Ended

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats have the model's
PING_SECONDS = 7.5  # what was silent for so long is pinged before it was for twice as long


Body = CompletionRequest | ChatRequest


@dataclass(frozen=True)
class Shape:
    """In what one endpoint differs from the other."""

    schema: type[CompletionRequest] | type[ChatRequest]
    whole: Callable[[str, str, int, Sequence[Answer], Usage], Answer]
    choice: Callable[[int, str, FinishReason, Logprobs | None], Answer]
    events: type[sse.CompletionEvents] | type[sse.ChatEvents]
    default_max_tokens: int | None

    def submissions(self, body: Body) -> list[Submission]:
        """One for each prompt of a body."""
        return Submission.all_of(body, self.default_max_tokens)


COMPLETION = Shape(
    CompletionRequest,
    answers.completion,
    answers.completion_choice,
    sse.CompletionEvents,
    DEFAULT_COMPLETION_TOKENS,
)
CHAT = Shape(ChatRequest, answers.chat_completion, answers.chat_choice, sse.ChatEvents, None)


async def serve(
    shape: Shape,
    door: Door,
    request: Request,
    tenant: Tenant,
    body: Body,
    submissions: Sequence[Submission],
    send: Send,
) -> Response | None:
    """Answer one request: whole as a response, or streamed through `send`."""
    async with exchange(door, request, tenant, *submissions) as running:
        if not body.stream:
            return await _whole(shape, running, body)
        await running.begin()
        await Stream(shape, running, body, send).run()
        return None


def _parser(body: Body, ticket: Ticket) -> ToolParser | None:
    """What finds the calls in a choice's text, if it may have any."""
    if not isinstance(body, ChatRequest) or not body.offered_tools:
        return None
    form = _form(body, ticket.model)
    assert form, "checked on admission"
    return ToolParser(form, ticket.request_id, body.parallel_tool_calls is not False)


def _form(body: ChatRequest, model: Model) -> Format | None:
    """How the calls in an answer will be written."""
    if isinstance(body.tool_choice, Named):
        return forced_to(body.tool_choice.name)
    return FORCED if body.forces_tools else written_by(model.chat_template)


@dataclass
class Said:
    """What one choice has said so far, and its last record."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    last: Record = field(default_factory=dict)

    def take(self, record: Record) -> None:
        self.texts.append(record.get("text", ""))
        self.logprobs += record.get("logprobs", ())
        self.last = record


async def _whole(shape: Shape, running: Exchange, body: Body) -> Response:
    said = [Said() for _ in running.tickets]
    while not running.ended:
        record = await running.next()
        said[record["choice"]].take(record)
    choices = [
        _choice(shape, body, ticket, index, each)
        for index, (ticket, each) in enumerate(zip(running.tickets, said, strict=True))
    ]
    usage = total_usage([each.last["usage"] for each in said], body.choices)
    request_id = running.ticket.request_id
    answer = shape.whole(request_id, body.model, int(time.time()), choices, usage)
    return json_response(answer, running.ticket, record["timing"])


def _choice(shape: Shape, body: Body, ticket: Ticket, index: int, said: Said) -> Answer:
    text, reason = "".join(said.texts), said.last["finish_reason"]
    logprobs = said.logprobs if body.wanted_logprobs is not None else None
    if parser := _parser(body, ticket):
        found, rest = parser.push(text), parser.finish()
        calls = found.calls + rest.calls
        return answers.chat_choice(index, found.text + rest.text, reason, logprobs, calls)
    return shape.choice(index, text, reason, logprobs)


class Stream:
    """Server-sent events of one request; what is there at once is sent at once."""

    def __init__(self, shape: Shape, running: Exchange, body: Body, send: Send) -> None:
        self._running, self._body, self._send = running, body, send
        self._usages: dict[int, Usage] = {}
        self._silent = True
        self._created = int(time.time())
        self._events = [
            self._events_of(shape, ticket, index) for index, ticket in enumerate(running.tickets)
        ]

    def _events_of(self, shape: Shape, ticket: Ticket, index: int) -> sse.Events:
        body = self._body
        head = (self._running.ticket.request_id, body.model, self._created)
        if parser := _parser(body, ticket):
            return sse.ToolEvents(parser, *head, index, body.include_usage)
        return shape.events(*head, index, body.include_usage)

    async def run(self) -> None:
        """Send it to its end; an error that comes after the headers is the last event."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        await self._write(b"".join(events.opening() for events in self._events))
        async with asyncio.TaskGroup() as tasks:
            pinging = tasks.create_task(self._ping(), name="ping")
            await self._relay()
            pinging.cancel()

    async def _relay(self) -> None:
        try:
            while not await self._more():
                pass
        except Ended as error:
            await self._write(sse.error(error), last=True)

    async def _ping(self) -> None:
        # a timeout around each wait for a record would cost a tenth of what a stream does
        while True:
            self._silent = True
            await asyncio.sleep(PING_SECONDS)
            if self._silent:
                await self._write(sse.PING)

    async def _more(self) -> bool:
        """Send the next records; True once the last one was among them."""
        records = [await self._running.next(), *self._running.ready()]
        ended = self._running.ended
        data = b"".join(map(self._event, records))
        await self._write(data + self._ending() if ended else data, last=ended)
        return ended

    def _event(self, record: Record) -> bytes:
        events = self._events[record["choice"]]
        if record["type"] == "chunk":
            return events.text(record["text"], record.get("logprobs"))
        if record["type"] == "done":
            self._usages[record["choice"]] = record["usage"]
            return events.finish(record["finish_reason"])
        return b""

    def _ending(self) -> bytes:
        """What follows the last choice's end."""
        if not self._body.include_usage:
            return sse.DONE
        usages = [self._usages[index] for index in range(len(self._events))]
        return self._events[0].usage(total_usage(usages, self._body.choices)) + sse.DONE

    async def _write(self, data: bytes, last: bool = False) -> None:
        if not data and not last:
            return
        self._silent = False
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        ticket = self._running.ticket
        return [
            (b"content-type", sse.MEDIA_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", ticket.request_id.encode()),
            (b"server-timing", stage_header(server_timing(ticket, {})).encode()),
        ]

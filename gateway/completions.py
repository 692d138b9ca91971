"""/v1/completions and /v1/chat/completions, streamed and whole."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from gateway import answers, sse
from gateway.answers import Answer
from gateway.door import Door
from gateway.endpoint import json_response, server_timing, stage_header
from gateway.exchange import Exchange, exchange
from gateway.following import Record
from gateway.schemas.completions import ChatRequest, CompletionRequest
from gateway.submission import Submission
from registry.tenants import Tenant
from streams.errors import Ended

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats have the model's
PING_SECONDS = 15.0


@dataclass(frozen=True)
class Shape:
    """In what one endpoint differs from the other."""

    schema: type[CompletionRequest] | type[ChatRequest]
    whole: Callable[..., Answer]
    events: type[sse.CompletionEvents] | type[sse.ChatEvents]
    default_max_tokens: int


COMPLETION = Shape(
    CompletionRequest, answers.completion, sse.CompletionEvents, DEFAULT_COMPLETION_TOKENS
)
CHAT = Shape(ChatRequest, answers.chat_completion, sse.ChatEvents, 0)


async def serve(
    shape: Shape,
    door: Door,
    request: Request,
    tenant: Tenant,
    body: CompletionRequest | ChatRequest,
    send: Send,
) -> Response | None:
    """Answer one request: whole as a response, or streamed through `send`."""
    submission = Submission.of(body, shape.default_max_tokens)
    async with exchange(door, request, tenant, submission) as running:
        if not body.stream:
            return await _whole(shape, running, body)
        await running.begin()
        await Stream(shape, running, body, send).run()
        return None


async def _whole(
    shape: Shape, running: Exchange, body: CompletionRequest | ChatRequest
) -> Response:
    text: list[str] = []
    logprobs: list[dict[str, Any]] = []
    while (record := await running.next())["type"] != "done":
        text.append(record.get("text", ""))
        logprobs += record.get("logprobs", ())
    answer = shape.whole(
        running.ticket.request_id,
        body.model,
        int(time.time()),
        "".join(text),
        record["finish_reason"],
        record["usage"],
        logprobs if body.wanted_logprobs is not None else None,
    )
    return json_response(answer, running.ticket, record["timing"])


class Stream:
    """Server-sent events of one request; what is there at once is sent at once."""

    def __init__(
        self,
        shape: Shape,
        running: Exchange,
        body: CompletionRequest | ChatRequest,
        send: Send,
    ) -> None:
        self._running, self._send = running, send
        self._include_usage = body.include_usage
        self._events = shape.events(
            running.ticket.request_id, body.model, int(time.time()), body.include_usage
        )

    async def run(self) -> None:
        """Send it to its end; an error that comes after the headers is the last event."""
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        await self._write(self._events.opening())
        try:
            while not await self._more():
                pass
        except Ended as error:
            await self._write(sse.error(error), last=True)

    async def _more(self) -> bool:
        """Send the next records; True once the last one was among them."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                first = await self._running.next()
        except TimeoutError:
            await self._write(sse.PING)
            return False
        records = [first, *self._running.ready()]
        ended: bool = records[-1]["type"] == "done"
        await self._write(b"".join(map(self._event, records)), last=ended)
        return ended

    def _event(self, record: Record) -> bytes:
        if record["type"] == "chunk":
            return self._events.text(record["text"], record.get("logprobs"))
        if record["type"] == "done":
            usage = self._events.usage(record["usage"]) if self._include_usage else b""
            return self._events.finish(record["finish_reason"]) + usage + sse.DONE
        return b""

    async def _write(self, data: bytes, last: bool = False) -> None:
        if not data and not last:
            return
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

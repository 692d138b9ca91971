"""Serves /v1/completions and /v1/chat/completions, streamed and whole."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from api import completion_events, event_ids
from api.authentication.authenticator import Principal
from api.endpoints.completion_endpoint import (
    AnswerFormat,
    AnswerHead,
    CompletionBody,
    make_tool_parser,
)
from api.event_ids import ChoicePosition, EventNumbering, StreamPosition
from api.openai_bodies import JsonBody, total_usage
from api.submission.submission_record import Submission
from gateway.admission.client_requests import Ticket
from gateway.context import GatewayContext
from gateway.entrypoints.choice_fanout import ChoiceFanout, submit_choices
from gateway.entrypoints.endpoint import collect_stages, format_server_timing, json_response
from gateway.replies.record_queue import ClientGone
from streams.errors import Ended
from streams.messages import Record

PING_INTERVAL_SECONDS = 7.5  # a stream is pinged after a silence of one to two intervals


async def serve(
    answer_format: AnswerFormat,
    context: GatewayContext,
    request: Request,
    principal: Principal,
    body: CompletionBody,
    submissions: Sequence[Submission],
    send: Send,
) -> Response | None:
    """Answer one request: return the whole response, or send a stream with `send` and return None.

    `answer_format` is that of the endpoint. A stream waits a little for its first output, so that
    an error before it has its own status. A stream with a `Last-Event-ID` goes on behind that
    event.
    """
    had = _position_of_client(request, body, sum(each.choices for each in submissions))
    async with submit_choices(
        context, request, principal, *submissions, resumes=had is not None
    ) as fanout:
        if not body.stream:
            return await _respond_whole(answer_format, fanout, body)
        model = fanout.ticket.model.name
        is_asleep = context.is_asleep(model)
        if not is_asleep:
            await fanout.await_first_output()
        stream = CompletionStream(answer_format, fanout, body, send, had)
        await stream.run(_follow_wake(context, model) if is_asleep else None)
        return None


async def _follow_wake(context: GatewayContext, model: str) -> AsyncGenerator[bytes]:
    """Yield how far the wake of a model is, as comments of a stream of server-sent events."""
    async for waking in context.fleet.follow(model):
        left = waking.seconds_left(context.broker.clock.now())
        yield completion_events.encode_waking(waking.phase, left)


def _position_of_client(
    request: Request, body: CompletionBody, choices: int
) -> StreamPosition | None:
    """Return the place from which a stream is resumed; None for a new stream or a whole answer."""
    event_id = request.headers.get(event_ids.HEADER)
    return event_ids.parse_event_id(event_id, choices) if event_id and body.stream else None


@dataclass
class ChoiceOutput:
    """The text and the log probabilities of one choice so far, and the record that came last."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    last: Record = field(default_factory=dict)

    def add_record(self, record: Record) -> None:
        """Add the next record of the choice, of any type; only chunks have text."""
        self.texts.append(record.get("text", ""))
        self.logprobs += record.get("logprobs", ())
        self.last = record


async def _respond_whole(
    answer_format: AnswerFormat, fanout: ChoiceFanout, body: CompletionBody
) -> Response:
    outputs = [ChoiceOutput() for _ in fanout.tickets]
    while not fanout.is_ended:
        record = await fanout.next()
        outputs[record["choice"]].add_record(record)
    choices = [
        _build_choice(answer_format, body, ticket, index, each)
        for index, (ticket, each) in enumerate(zip(fanout.tickets, outputs, strict=True))
    ]
    usage = total_usage([each.last["usage"] for each in outputs], body.choice_count)
    request_id = fanout.ticket.request_id
    answer = answer_format.build_body(request_id, body.model, int(time.time()), choices, usage)
    return json_response(answer, fanout.ticket, record["timing"])


def _build_choice(
    answer_format: AnswerFormat,
    body: CompletionBody,
    ticket: Ticket,
    index: int,
    output: ChoiceOutput,
) -> JsonBody:
    parser = make_tool_parser(body, ticket.version, ticket.request_id)
    text = "".join(output.texts)
    return answer_format.choice_of(body, parser, index, text, output.last, output.logprobs)


class CompletionStream:
    """Sends the answer to one request as server-sent events, through ASGI's `send`.

    All records that are ready are sent in one write. A stream that is silent for long is pinged.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        fanout: ChoiceFanout,
        body: CompletionBody,
        send: Send,
        had: StreamPosition | None = None,
    ) -> None:
        self._request, self._body, self._send = fanout, body, send
        self._ends: dict[int, Record] = {}
        self._is_silent, self._has_started = True, False
        had = had or StreamPosition(int(time.time()), (ChoicePosition(),) * len(fanout.tickets))
        self._created, self._numbering = had.created, EventNumbering(had)
        self._events = [
            self._choice_events(answer_format, ticket, index)
            for index, ticket in enumerate(fanout.tickets)
        ]

    def _choice_events(
        self, answer_format: AnswerFormat, ticket: Ticket, index: int
    ) -> completion_events.AnswerEvents:
        parser = make_tool_parser(self._body, ticket.version, ticket.request_id)
        request_id = self._request.ticket.request_id
        head = AnswerHead(request_id, self._created, ticket.prompt_tokens, index)
        return answer_format.start_events(self._body, parser, head)

    async def run(self, comments: AsyncGenerator[bytes] | None = None) -> None:
        """Send the headers and all events, and return when the stream has ended.

        `comments` are sent as they come until a worker has begun.

        An error of the request is sent as the last event and not raised, since the headers are out.
        Raises `ClientGone` if the client leaves.
        """
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        openings = (events.opening() for events in self._events)
        await self._write(b"".join(map(self._numbering.other, count(), openings)))
        has_left = False
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._ping(), name="ping")]
                if comments:
                    beside.append(tasks.create_task(self._send_comments(comments), name="wake"))
                await self._send_records()
                for task in beside:
                    task.cancel()
        except* ClientGone:
            has_left = True
        if has_left:
            raise ClientGone

    async def _send_records(self) -> None:
        try:
            while not await self._send_next():
                pass
        except Ended as error:
            self._has_started = True  # no comment may come behind the last event
            await self._write(self._events[0].failure(error), last=True)

    async def _send_comments(self, comments: AsyncGenerator[bytes]) -> None:
        async with aclosing(comments):
            async for comment in comments:
                if self._has_started:
                    return
                await self._write(comment)

    async def _ping(self) -> None:
        # A timeout around each wait for a record would cost a tenth of the stream's whole work
        while True:
            self._is_silent = True
            await asyncio.sleep(PING_INTERVAL_SECONDS)
            if self._is_silent:
                await self._write(self._events[0].ping)

    async def _send_next(self) -> bool:
        """Send the next records; True once all choices have ended."""
        records = [await self._request.next(), *self._request.next_ready()]
        ended = self._request.is_ended
        data = b"".join(map(self._encode_record, records))
        await self._write(data + self._encode_end() if ended else data, last=ended)
        return ended

    def _encode_record(self, record: Record) -> bytes:
        choice = record["choice"]
        events = self._events[choice]
        if record["type"] == "started":
            self._has_started = True
        if record["type"] == "chunk":
            return b"".join(
                self._numbering.output(
                    choice, events.text(part["text"], part.get("logprobs")), part
                )
                for part in self._numbering.split(record)
            )
        if record["type"] == "done":
            self._ends[choice] = record
            return self._numbering.other(choice, events.finish(record["finish_reason"]))
        return b""

    def _encode_end(self) -> bytes:
        """The events that follow the last choice's end."""
        ends = [self._ends[index] for index in range(len(self._events))]
        usage = total_usage([end["usage"] for end in ends], self._body.choice_count)
        return self._numbering.ending(self._events[0].ending(usage, ends[0]))

    async def _write(self, data: bytes, last: bool = False) -> None:
        if not data and not last:
            return
        self._is_silent = False
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        ticket = self._request.ticket
        return [
            (b"content-type", completion_events.MEDIA_TYPE.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            (b"server-timing", format_server_timing(collect_stages(ticket, {})).encode()),
        ]

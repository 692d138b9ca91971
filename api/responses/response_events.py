"""Events of a response's stream, numbered by its token log, and the output items that they make.

The number of a delta is 4 plus the index of its last token, so that every gateway gives the same
numbers, from the log or from the result. Events that have no token of their own take the next
number, and a delta whose number is taken, too: numbers rise, with holes. Pure.
"""

from collections.abc import Sequence

import orjson

from api.openai_bodies import JsonBody, Logprobs, chat_logprobs
from api.responses.response_bodies import (
    ResponseEnd,
    ResponseHead,
    output_text,
    response_object,
)
from api.tool_calls import ParsedDelta, ToolCall, ToolParser

FIRST_DELTA = 4  # created, in_progress, output_item.added and content_part.added come before it


def encode_event(event: JsonBody) -> bytes:
    """Return an event as a server-sent one."""
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event))


class ResponseEvents:
    """Makes the events of one response, in order; each has its `sequence_number`.

    Call `created` first, `started` once it runs, `chunk` for each chunk of the log, and `end`.
    `output` then has the items of the whole response.
    """

    def __init__(self, head: ResponseHead, parser: ToolParser | None = None) -> None:
        self._head, self._parser = head, parser
        self._number, self._tokens = -1, 0
        self.output: list[JsonBody] = []
        self._message: _OpenMessage | None = None
        self._has_started = False

    @property
    def next_number(self) -> int:
        """The least number that no event has."""
        return self._number + 1

    def created(self) -> list[JsonBody]:
        """Return the first event."""
        status = ResponseEnd("queued" if self._head.body.background else "in_progress")
        return [self._lifecycle("created", status)]

    def started(self) -> list[JsonBody]:
        """Return the event that the response runs; only the first call returns any."""
        if self._has_started:
            return []
        self._has_started = True
        return [self._lifecycle("in_progress", ResponseEnd("in_progress"))]

    def chunk(self, count: int, text: str, logprobs: Logprobs | None) -> list[JsonBody]:
        """Return the events for the next `count` tokens of the log, with their text."""
        events = self.started()
        self._tokens += count
        told = chat_logprobs(logprobs)["content"] if self._tells_logprobs and logprobs else []
        delta = self._parser.push(text) if self._parser else ParsedDelta(text)
        return events + self._delta(delta, told)

    def end(self, end: ResponseEnd) -> list[JsonBody]:
        """Return the last events: what is open is closed, and the whole response is told."""
        events = self.started()
        if self._parser:
            events += self._delta(self._parser.finish(), [])
        is_whole = end.status == "completed"
        if not self.output and not self._message and end.status in ("completed", "incomplete"):
            events += self._open_message()
        events += self._close_message("completed" if is_whole else "incomplete")
        return [*events, self._lifecycle(end.status, end)]

    @property
    def _tells_logprobs(self) -> bool:
        return self._head.body.tells_logprobs

    def _lifecycle(self, kind: str, end: ResponseEnd) -> JsonBody:
        return self._event(kind, {"response": response_object(self._head, end, self.output)})

    def _event(self, kind: str, fields: JsonBody, least: int = 0) -> JsonBody:
        self._number = max(self._number + 1, least)
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def _delta(self, delta: ParsedDelta, logprobs: list[JsonBody]) -> list[JsonBody]:
        events = self._text(delta.text, logprobs) if delta.text or logprobs else []
        for call in delta.calls:
            events += self._close_message("completed")
            events += self._call(call)
        return events

    def _text(self, text: str, logprobs: list[JsonBody]) -> list[JsonBody]:
        events = [] if self._message else self._open_message()
        message = self._message
        assert message
        message.add(text, logprobs)
        fields = {**message.place, "delta": text, "logprobs": logprobs}
        least = FIRST_DELTA + self._tokens - 1
        return [*events, self._event("output_text.delta", fields, least)]

    def _open_message(self) -> list[JsonBody]:
        index = len(self.output)
        message = self._message = _OpenMessage(self._item_id("msg"), index)
        item = message.item("in_progress", [])
        added = {"output_index": index, "item": item}
        return [
            self._event("output_item.added", added),
            self._event("content_part.added", {**message.place, "part": output_text("")}),
        ]

    def _close_message(self, status: str) -> list[JsonBody]:
        message, self._message = self._message, None
        if message is None:
            return []
        part = output_text(message.text, message.logprobs)
        item = message.item(status, [part])
        self.output.append(item)
        told = {"text": message.text, "logprobs": message.logprobs}
        return [
            self._event("output_text.done", {**message.place, **told}),
            self._event("content_part.done", {**message.place, "part": part}),
            self._event("output_item.done", {"output_index": message.index, "item": item}),
        ]

    def _call(self, call: ToolCall) -> list[JsonBody]:
        index, item_id = len(self.output), self._item_id("fc")
        item = {
            "id": item_id,
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        self.output.append(item)
        place: JsonBody = {"item_id": item_id, "output_index": index}
        begun = item | {"status": "in_progress", "arguments": ""}
        done = {"name": call.name, "arguments": call.arguments}
        return [
            self._event("output_item.added", {"output_index": index, "item": begun}),
            self._event("function_call_arguments.delta", {**place, "delta": call.arguments}),
            self._event("function_call_arguments.done", {**place, **done}),
            self._event("output_item.done", {"output_index": index, "item": item}),
        ]

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._head.id}_{len(self.output)}"


class _OpenMessage:
    """The message to which text is being added."""

    def __init__(self, item_id: str, index: int) -> None:
        self.item_id, self.index = item_id, index
        self.logprobs: list[JsonBody] = []
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def place(self) -> JsonBody:
        return {"item_id": self.item_id, "output_index": self.index, "content_index": 0}

    def add(self, text: str, logprobs: Sequence[JsonBody]) -> None:
        self._texts.append(text)
        self.logprobs += logprobs

    def item(self, status: str, content: list[JsonBody]) -> JsonBody:
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

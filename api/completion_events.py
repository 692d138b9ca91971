"""Server-sent events of a streamed completion or chat.

Per token only the text changes, so everything around it is encoded once per choice, for speed.
"""

from abc import ABC, abstractmethod
from itertools import count
from typing import Protocol

import orjson

from api import error_bodies, openai_bodies
from api.openai_bodies import FinishReason, JsonBody, Logprobs, Usage
from api.tool_calls import ParsedDelta, ToolCall, ToolParser
from streams.errors import MillstreamError
from streams.logprob_token_text import count_characters
from streams.messages import Record

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, against proxies that close silent connections
MEDIA_TYPE = "text/event-stream"
_TEXT_SLOT = "\0"  # stands for the text in the event that is encoded once


def encode_event(body: JsonBody) -> bytes:
    """Return the bytes of a server-sent event whose data is `body` as JSON."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def encode_waking(phase: str, seconds_left: float | None) -> bytes:
    """Return the comment that tells how far the first worker of a model is.

    Comments are read by no client of OpenAI or Anthropic.
    """
    return b": waking " + orjson.dumps({"phase": phase, "seconds_left": seconds_left}) + b"\n\n"


class AnswerEvents(Protocol):
    """Encodes the server-sent events of one choice, as one endpoint has them.

    All methods return bytes and send nothing; they are called in this order. `ping` keeps a silent
    stream open.
    """

    ping: bytes

    def opening(self) -> bytes:
        """Return the events before the first text; empty if the endpoint has none."""

    def text(self, text: str, logprobs: Logprobs | None = None) -> bytes:
        """Return the events for the next tokens, whose text may be empty."""

    def finish(self, reason: FinishReason) -> bytes:
        """Return the last events of this choice."""

    def ending(self, usage: Usage, end: Record) -> bytes:
        """Return the events behind those of all choices; `usage` is of all, `end` the last record.

        Only the first choice's encoder is asked.
        """

    def failure(self, error: MillstreamError) -> bytes:
        """Return the event with which a stream ends that fails after its headers were sent."""


class ChoiceEvents(ABC):
    """Encodes the server-sent events of one choice, that is, of one of the `n` answers to a prompt.

    All methods return bytes and send nothing. Call `opening` first, `text` for each piece of the
    answer, and `finish` at its end. When all choices have finished, `ending` follows: the usage if
    the client asked for it, and then `DONE`. With `include_usage`, every other event has
    `"usage": null`, as OpenAI's have.
    """

    ping = PING

    def __init__(self, head: JsonBody, index: int, include_usage: bool) -> None:
        self._head, self._index = head, index
        self._tail: JsonBody = {"usage": None} if include_usage else {}
        prepared = self._event(self._content(_TEXT_SLOT))
        before, slot, after = prepared.partition(orjson.dumps(_TEXT_SLOT))
        assert slot, "a choice holds its text"
        self._before, self._after = before, after

    def opening(self) -> bytes:
        """Return the event to send before the first text; empty if the endpoint has none."""
        return b""

    def text(self, text: str, logprobs: Logprobs | None = None) -> bytes:
        """Return the event for the next tokens of the answer.

        `text` is their text, which may be empty. `logprobs` has one entry per token; None if the
        client did not ask for log probabilities.
        """
        if logprobs is None:
            return self._before + orjson.dumps(text) + self._after
        return self._event(self._content(text), logprobs=self._logprobs(logprobs))

    def finish(self, reason: FinishReason) -> bytes:
        """Return the last event of this choice, which has the finish reason and no text."""
        return self._event(self._last_content(), reason=reason)

    def ending(self, usage: Usage, end: Record) -> bytes:
        """Return the whole response's token counts, if they were asked for, and the last line."""
        return (self.usage(usage) if self._tail else b"") + DONE

    def usage(self, usage: Usage) -> bytes:
        """Return the event with the whole response's token counts and no choices."""
        return encode_event({**self._head, "choices": [], "usage": usage})

    def failure(self, error: MillstreamError) -> bytes:
        """Return the event of an error; its data is the body that an error response would have."""
        return encode_event(error_bodies.error_body(error))

    def _event(
        self,
        content: JsonBody,
        logprobs: JsonBody | None = None,
        reason: FinishReason | None = None,
    ) -> bytes:
        rest = {"logprobs": logprobs, "finish_reason": reason}
        choice = {"index": self._index, **content, **rest}
        return encode_event({**self._head, "choices": [choice], **self._tail})

    @abstractmethod
    def _content(self, text: str) -> JsonBody:
        """The fields of a choice that hold `text` at this endpoint."""

    def _last_content(self) -> JsonBody:
        return self._content("")

    @abstractmethod
    def _logprobs(self, logprobs: Logprobs) -> JsonBody:
        """The log probabilities of the next tokens."""


class CompletionEvents(ChoiceEvents):
    """Events of one choice of a streamed /v1/completions; `created` is in epoch seconds.

    `index` is the choice's place in the response.
    """

    def __init__(
        self, request_id: str, model: str, created: int, index: int = 0, include_usage: bool = False
    ) -> None:
        head = openai_bodies.body_head(
            openai_bodies.completion_id(request_id), "text_completion", created, model
        )
        super().__init__(head, index, include_usage)
        self._offset, self._cut = 0, b""  # characters of tokens so far, bytes of one begun

    def text(self, text: str, logprobs: Logprobs | None = None) -> bytes:
        """Return the event for the next tokens, and count their characters for later text offsets.

        The arguments are those of `ChoiceEvents.text`.
        """
        if logprobs is None:
            self._offset += len(text)
        return super().text(text, logprobs)

    def _content(self, text: str) -> JsonBody:
        return {"text": text}

    def _logprobs(self, logprobs: Logprobs) -> JsonBody:
        offset, cut = self._offset, self._cut
        counts, self._cut = count_characters([each["text"] for each in logprobs], cut)
        self._offset += counts[-1]
        return openai_bodies.completion_logprobs(logprobs, offset, cut)


class ChatEvents(ChoiceEvents):
    """Events of one choice of a streamed /v1/chat/completions; `created` is in epoch seconds.

    `index` is the choice's place in the response.
    """

    def __init__(
        self, request_id: str, model: str, created: int, index: int = 0, include_usage: bool = False
    ) -> None:
        head = openai_bodies.body_head(
            openai_bodies.chat_id(request_id), "chat.completion.chunk", created, model
        )
        super().__init__(head, index, include_usage)

    def opening(self) -> bytes:
        """Return the event that goes before the first text and names the assistant's role."""
        return self._event({"delta": {"role": "assistant", "content": ""}})

    def _content(self, text: str) -> JsonBody:
        return {"delta": {"content": text}}

    def _last_content(self) -> JsonBody:
        return {"delta": {}}

    def _logprobs(self, logprobs: Logprobs) -> JsonBody:
        return openai_bodies.chat_logprobs(logprobs)


class ToolCallEvents(ChatEvents):
    """Events of a chat choice in whose text `parser` finds tool calls.

    Calls are sent as `tool_calls` and do not appear in the text. Text that may be the begin of a
    call is held back until that is certain, so an event can be empty or hold more than its piece.
    """

    def __init__(
        self,
        parser: ToolParser,
        request_id: str,
        model: str,
        created: int,
        index: int = 0,
        include_usage: bool = False,
    ) -> None:
        super().__init__(request_id, model, created, index, include_usage)
        self._parser = parser

    def text(self, text: str, logprobs: Logprobs | None = None) -> bytes:
        """Return the events for all text and calls that are certain after this piece; may be empty.

        Log probabilities are sent with their piece, even while its text is held back.
        """
        return self._encode_delta(self._parser.push(text), logprobs)

    def finish(self, reason: FinishReason) -> bytes:
        """Return events for the text and calls held back so far, and then the choice's last event.

        The finish reason `stop` becomes `tool_calls` if the answer has called a tool.
        """
        rest = self._encode_delta(self._parser.finish())
        return rest + super().finish(
            openai_bodies.choose_finish_reason(self._parser.call_count, reason)
        )

    def _encode_delta(self, delta: ParsedDelta, logprobs: Logprobs | None = None) -> bytes:
        """Events of the text, then of the calls; log probabilities come even without a text."""
        text = super().text(delta.text, logprobs) if delta.text or logprobs is not None else b""
        first = self._parser.call_count - len(delta.calls)
        return text + b"".join(map(self._encode_call, count(first), delta.calls))

    def _encode_call(self, index: int, call: ToolCall) -> bytes:
        """Two events for a call, as OpenAI sends them: the function's name, then its arguments."""
        whole = openai_bodies.tool_call(call)
        named = {"index": index, **whole, "function": {"name": call.name, "arguments": ""}}
        rest = {"index": index, "function": {"arguments": call.arguments}}
        return b"".join(self._event({"delta": {"tool_calls": [each]}}) for each in (named, rest))

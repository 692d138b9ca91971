"""Server-sent events of a streamed completion, made for speed.

Per token only the text changes, so everything around it is encoded once per stream.
"""

from abc import ABC, abstractmethod
from itertools import count

import orjson

from api import error_bodies, openai_bodies
from api.openai_bodies import FinishReason, JsonBody, Logprobs, Usage
from api.tool_calls import ParsedDelta, ToolCall, ToolParser
from streams.errors import MillstreamError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, against proxies that end silent connections
MEDIA_TYPE = "text/event-stream"
_TEXT_SLOT = "\0"


def encode_event(body: JsonBody) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def error_event(failure: MillstreamError) -> bytes:
    """The last event of a stream that failed after it had begun."""
    return encode_event(error_bodies.error_body(failure))


class ChoiceEvents(ABC):
    """Makes the events of one choice, in the order `opening`, `text`..., `finish`.

    `usage` and `DONE` follow once all choices have finished. With `include_usage` each event before
    `usage` says that its own is null, as OpenAI's do.
    """

    def __init__(self, head: JsonBody, index: int, include_usage: bool) -> None:
        self._head, self._index = head, index
        self._tail: JsonBody = {"usage": None} if include_usage else {}
        prepared = self._event(self._content(_TEXT_SLOT))
        before, slot, after = prepared.partition(orjson.dumps(_TEXT_SLOT))
        assert slot, "a choice holds its text"
        self._before, self._after = before, after
        self._characters = 0

    def opening(self) -> bytes:
        """What comes before the first text; empty where nothing does."""
        return b""

    def text(self, text: str, logprobs: Logprobs | None = None) -> bytes:
        """The next tokens' text; it may be empty."""
        self._characters += len(text)
        if logprobs is None:
            return self._before + orjson.dumps(text) + self._after
        return self._event(self._content(text), logprobs=self._logprobs(text, logprobs))

    def finish(self, reason: FinishReason) -> bytes:
        """The choice's last event, without text."""
        return self._event(self._last_content(), reason=reason)

    def usage(self, usage: Usage) -> bytes:
        """An event without choices, for clients that asked for it."""
        return encode_event({**self._head, "choices": [], "usage": usage})

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
        """A text as the endpoint's choices have it."""

    def _last_content(self) -> JsonBody:
        return self._content("")

    @abstractmethod
    def _logprobs(self, text: str, logprobs: Logprobs) -> JsonBody:
        """The log probabilities of a text that was just counted."""


class CompletionEvents(ChoiceEvents):
    """A choice in the stream of /v1/completions; `created` is in epoch seconds."""

    def __init__(
        self, request_id: str, model: str, created: int, index: int = 0, include_usage: bool = False
    ) -> None:
        head = openai_bodies.body_head(
            openai_bodies.completion_id(request_id), "text_completion", created, model
        )
        super().__init__(head, index, include_usage)

    def _content(self, text: str) -> JsonBody:
        return {"text": text}

    def _logprobs(self, text: str, logprobs: Logprobs) -> JsonBody:
        return openai_bodies.completion_logprobs(logprobs, self._characters - len(text))


class ChatEvents(ChoiceEvents):
    """A choice in the stream of /v1/chat/completions; `created` is in epoch seconds."""

    def __init__(
        self, request_id: str, model: str, created: int, index: int = 0, include_usage: bool = False
    ) -> None:
        head = openai_bodies.body_head(
            openai_bodies.chat_id(request_id), "chat.completion.chunk", created, model
        )
        super().__init__(head, index, include_usage)

    def opening(self) -> bytes:
        """Says who speaks."""
        return self._event({"delta": {"role": "assistant", "content": ""}})

    def _content(self, text: str) -> JsonBody:
        return {"delta": {"content": text}}

    def _last_content(self) -> JsonBody:
        return {"delta": {}}

    def _logprobs(self, text: str, logprobs: Logprobs) -> JsonBody:
        return openai_bodies.chat_logprobs(logprobs)


class ToolCallEvents(ChatEvents):
    """As `ChatEvents`, with calls of tools taken out of the text by `parser`."""

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
        return self._encode_delta(self._parser.push(text), logprobs)

    def finish(self, reason: FinishReason) -> bytes:
        rest = self._encode_delta(self._parser.finish())
        return rest + super().finish(
            openai_bodies.choose_finish_reason(self._parser.call_count, reason)
        )

    def _encode_delta(self, said: ParsedDelta, logprobs: Logprobs | None = None) -> bytes:
        """Log probabilities come with their tokens, also where these have no text."""
        text = super().text(said.text, logprobs) if said.text or logprobs is not None else b""
        first = self._parser.call_count - len(said.calls)
        return text + b"".join(map(self._encode_call, count(first), said.calls))

    def _encode_call(self, index: int, call: ToolCall) -> bytes:
        """The function first, then its arguments."""
        whole = openai_bodies.tool_call(call)
        named = {"index": index, **whole, "function": {"name": call.name, "arguments": ""}}
        rest = {"index": index, "function": {"arguments": call.arguments}}
        return b"".join(self._event({"delta": {"tool_calls": [each]}}) for each in (named, rest))

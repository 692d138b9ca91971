"""Server-sent events of a streamed completion, made for speed.

Per token only the text changes, so everything around it is encoded once per stream.
"""

from collections.abc import Callable
from typing import Any

import orjson

from gateway import answers
from gateway.answers import Answer, FinishReason, Logprobs, Usage
from streams.errors import MillstreamError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, against proxies that end silent connections
MEDIA_TYPE = "text/event-stream"
_SLOT = "\0"


def event(body: Answer) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def error(failure: MillstreamError) -> bytes:
    """The last event of a stream that failed after it had begun."""
    return event(answers.error(failure))


class Events:
    """Makes the events of one stream, in the order `opening`, `text`..., `finish`, `usage`, `DONE`.

    With `include_usage` each event before `usage` says that its own is null, as OpenAI's do.
    """

    def __init__(self, head: Answer, choice: Callable[[str], Answer], include_usage: bool) -> None:
        self._head, self._choice = head, choice
        self._tail: Answer = {"usage": None} if include_usage else {}
        before, slot, after = self._event(choice(_SLOT)).partition(orjson.dumps(_SLOT))
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
        return self._event(self._choice(text) | {"logprobs": self._logprobs(text, logprobs)})

    def finish(self, reason: FinishReason) -> bytes:
        """The choice's last event, without text."""
        return self._event(self._last() | {"finish_reason": reason})

    def usage(self, usage: Usage) -> bytes:
        """An event without choices, for clients that asked for it."""
        return event({**self._head, "choices": [], "usage": usage})

    def _event(self, choice: Answer) -> bytes:
        return event({**self._head, "choices": [choice], **self._tail})

    def _last(self) -> Answer:
        return self._choice("")

    def _logprobs(self, text: str, logprobs: Logprobs) -> Answer:
        return answers.completion_logprobs(logprobs, self._characters - len(text))


class CompletionEvents(Events):
    """The stream of /v1/completions; `created` is in epoch seconds."""

    def __init__(
        self, request_id: str, model: str, created: int, include_usage: bool = False
    ) -> None:
        head = _head(answers.completion_id(request_id), "text_completion", created, model)
        super().__init__(head, _completion_choice, include_usage)


class ChatEvents(Events):
    """The stream of /v1/chat/completions; `created` is in epoch seconds."""

    def __init__(
        self, request_id: str, model: str, created: int, include_usage: bool = False
    ) -> None:
        head = _head(answers.chat_id(request_id), "chat.completion.chunk", created, model)
        super().__init__(head, _chat_choice, include_usage)

    def opening(self) -> bytes:
        """Says who speaks."""
        return self._event(_choice({"delta": {"role": "assistant", "content": ""}}))

    def _last(self) -> Answer:
        return _choice({"delta": {}})

    def _logprobs(self, text: str, logprobs: Logprobs) -> Answer:
        return answers.chat_logprobs(logprobs)


def _head(answer_id: str, kind: str, created: int, model: str) -> Answer:
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def _choice(content: dict[str, Any]) -> Answer:
    return {"index": 0, **content, "logprobs": None, "finish_reason": None}


def _completion_choice(text: str) -> Answer:
    return _choice({"text": text})


def _chat_choice(text: str) -> Answer:
    return _choice({"delta": {"content": text}})

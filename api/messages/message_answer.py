"""The answer to /v1/messages: a message, whole or as server-sent events. Pure."""

from collections.abc import Sequence
from typing import Any

import orjson

from api.endpoints.completion_endpoint import AnswerHead, CompletionBody
from api.messages import message_errors
from api.openai_bodies import FinishReason, JsonBody, Logprobs, Usage
from api.tool_calls import ParsedDelta, ToolCall, ToolParser
from streams.errors import MillstreamError
from streams.messages import Record, cached_tokens

_TEXT_SLOT = "\0"  # stands for the text in the event that is encoded once for each block


def encode_event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event of the type `kind`, which its data has, too."""
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"


PING = encode_event("ping")


class MessageFormat:
    """Form in which /v1/messages tells an answer; satisfies `AnswerFormat`."""

    def choice_of(
        self,
        body: CompletionBody,
        parser: ToolParser | None,
        index: int,
        text: str,
        end: Record,
        logprobs: list[dict[str, Any]],
    ) -> JsonBody:
        """Return the content and the reason for the end; there is one choice, without logprobs."""
        parsed = parser.push(text) + parser.finish() if parser else ParsedDelta(text)
        texts = [{"type": "text", "text": parsed.text}] if parsed.text else []
        content = [*texts, *map(_tool_use, parsed.calls)]
        return {"content": content, **_describe_end(body.stop, end, bool(parsed.calls))}

    def build_body(
        self, request_id: str, model: str, created: int, choices: Sequence[JsonBody], usage: Usage
    ) -> JsonBody:
        """Return the whole message."""
        return _message(request_id, model) | choices[0] | {"usage": _count_usage(usage)}

    def start_events(
        self, body: CompletionBody, parser: ToolParser | None, head: AnswerHead
    ) -> "MessageEvents":
        """Return the encoder of the answer's events; calls that `parser` finds are told apart."""
        return MessageEvents(body, parser, head)


class MessageEvents:
    """Encodes the events of one message; satisfies `AnswerEvents`.

    A text block opens with its first text and closes before a tool's, or at the end. A call of a
    tool is a block of its own, sent once it is whole.
    """

    ping = PING

    def __init__(self, body: CompletionBody, parser: ToolParser | None, head: AnswerHead) -> None:
        self._model, self._stops = body.model, body.stop
        self._parser, self._head = parser, head
        self._index = 0  # of the open text block, or of the next one
        self._is_open = False
        self._before = self._after = b""  # what surrounds the text in an event of the open block

    def opening(self) -> bytes:
        """Return the message without content; its usage has the tokens of the prompt."""
        usage = {"input_tokens": self._head.prompt_tokens, "output_tokens": 0}
        message = _message(self._head.request_id, self._model)
        return encode_event("message_start", message={**message, "usage": usage})

    def text(self, text: str, logprobs: Logprobs | None = None) -> bytes:
        """Return the events of all text and calls that are certain by now; may be empty."""
        return self._encode_delta(self._parser.push(text) if self._parser else ParsedDelta(text))

    def finish(self, reason: FinishReason) -> bytes:
        """Return the events of what was held back, and the end of the last block."""
        rest = self._parser.finish() if self._parser else ParsedDelta()
        return self._encode_delta(rest) + self._close_text()

    def ending(self, usage: Usage, end: Record) -> bytes:
        """Return the reason for the end with all token counts, and the end itself."""
        has_calls = self._parser is not None and self._parser.call_count > 0
        delta = _describe_end(self._stops, end, has_calls)
        ended = encode_event("message_delta", delta=delta, usage=_count_usage(usage))
        return ended + encode_event("message_stop")

    def failure(self, error: MillstreamError) -> bytes:
        """Return the event of an error; its data is the body that an error response would have."""
        return encode_event("error", **message_errors.error_body(error, self._head.request_id))

    def _encode_delta(self, delta: ParsedDelta) -> bytes:
        text = self._encode_text(delta.text) if delta.text else b""
        return text + b"".join(map(self._encode_call, delta.calls))

    def _encode_text(self, text: str) -> bytes:
        start = b"" if self._is_open else self._open_text()
        return start + self._before + orjson.dumps(text) + self._after

    def _open_text(self) -> bytes:
        self._is_open = True
        prepared = self._delta_event({"type": "text_delta", "text": _TEXT_SLOT})
        self._before, _, self._after = prepared.partition(orjson.dumps(_TEXT_SLOT))
        return self._start_event({"type": "text", "text": ""})

    def _close_text(self) -> bytes:
        return self._stop_block() if self._is_open else b""

    def _encode_call(self, call: ToolCall) -> bytes:
        closed = self._close_text()
        started = self._start_event({**_tool_use(call), "input": {}})
        filled = self._delta_event({"type": "input_json_delta", "partial_json": call.arguments})
        return closed + started + filled + self._stop_block()

    def _start_event(self, block: JsonBody) -> bytes:
        return encode_event("content_block_start", index=self._index, content_block=block)

    def _delta_event(self, delta: JsonBody) -> bytes:
        return encode_event("content_block_delta", index=self._index, delta=delta)

    def _stop_block(self) -> bytes:
        stopped = encode_event("content_block_stop", index=self._index)
        self._index, self._is_open = self._index + 1, False
        return stopped


def _message(request_id: str, model: str) -> JsonBody:
    """Return a message that has only begun."""
    return {
        "id": f"msg_{request_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _tool_use(call: ToolCall) -> JsonBody:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": orjson.loads(call.arguments),
    }


def _describe_end(stops: Sequence[str], end: Record, has_calls: bool) -> JsonBody:
    """Return `stop_reason` and `stop_sequence`, which is one of the client's own `stops`, or null.

    A model may have stop strings of its own, of which a client knows nothing.
    """
    matched = end.get("stop_sequence")
    if end["finish_reason"] == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if matched in stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _count_usage(usage: Usage) -> JsonBody:
    """Return token counts in Anthropic's words: `input_tokens` are those that were not cached."""
    cached = cached_tokens(usage)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }

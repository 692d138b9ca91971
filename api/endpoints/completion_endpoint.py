"""Endpoints /v1/completions and /v1/chat/completions, with their differences as data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from api import completion_events, openai_bodies
from api.completion_events import AnswerEvents
from api.openai_bodies import FinishReason, JsonBody, Logprobs, Usage
from api.schemas.completions import ChatRequest, CompletionRequest
from api.schemas.tools import NamedToolChoice
from api.submission.submission_record import Submission
from api.tool_calls import (
    FORCED_CALLS,
    ToolCallFormat,
    ToolParser,
    detect_format,
    forced_function_format,
)
from registry.models import Version
from streams.messages import Record

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats have the model's


CompletionBody = CompletionRequest | ChatRequest


@dataclass(frozen=True)
class AnswerHead:
    """Facts of one choice of an answer that are known before its text.

    `request_id` is that of the whole answer, `created` is in epoch seconds, and `index` is the
    choice's place in the answer.
    """

    request_id: str
    created: int
    prompt_tokens: int
    index: int = 0


class AnswerFormat(Protocol):
    """Form in which one endpoint tells a generated answer, whole or as server-sent events."""

    def choice_of(
        self,
        body: CompletionBody,
        parser: ToolParser | None,
        index: int,
        text: str,
        end: Record,
        logprobs: list[dict[str, Any]],
    ) -> JsonBody:
        """Return a whole choice of an answer: its text, or the calls that `parser` finds in it.

        `end` is the record that ended it, of type `done`.
        """

    @property
    def build_body(self) -> Callable[[str, str, int, Sequence[JsonBody], Usage], JsonBody]:
        """Makes a whole answer of request id, model, time, choices and usage."""

    def start_events(
        self, body: CompletionBody, parser: ToolParser | None, head: AnswerHead
    ) -> AnswerEvents:
        """Return the encoder of one choice's events; calls that `parser` finds are told apart."""


@dataclass(frozen=True)
class CompletionEndpoint:
    """The parts in which /v1/completions and /v1/chat/completions differ; each has one instance.

    `schema` is its request body. `build_body` and `build_choice` make the response of an answer
    that is not streamed, `events_class` the events of one that is. `default_max_tokens` is the
    number of tokens to generate if the client sets none; None is what the context leaves.
    """

    schema: type[CompletionRequest] | type[ChatRequest]
    build_body: Callable[[str, str, int, Sequence[JsonBody], Usage], JsonBody]
    build_choice: Callable[[int, str, FinishReason, Logprobs | None], JsonBody]
    events_class: type[completion_events.CompletionEvents] | type[completion_events.ChatEvents]
    default_max_tokens: int | None

    def to_submissions(self, body: CompletionBody) -> list[Submission]:
        """Return one submission for each prompt of a body; a chat gives exactly one."""
        return Submission.all_from_body(body, self.default_max_tokens)

    def choice_of(
        self,
        body: CompletionBody,
        parser: ToolParser | None,
        index: int,
        text: str,
        end: Record,
        logprobs: list[dict[str, Any]],
    ) -> JsonBody:
        """Return a whole choice of an answer: its text, or the calls that `parser` finds in it.

        `end` is the record that ended it, of type `done`.
        """
        reason: FinishReason = end["finish_reason"]
        told = logprobs if body.requested_logprobs is not None else None
        if parser is None:
            return self.build_choice(index, text, reason, told)
        parsed, rest = parser.push(text), parser.finish()
        calls = parsed.calls + rest.calls
        return openai_bodies.chat_choice(index, parsed.text + rest.text, reason, told, calls)

    def start_events(
        self, body: CompletionBody, parser: ToolParser | None, head: AnswerHead
    ) -> AnswerEvents:
        """Return the encoder of one choice's events; calls that `parser` finds are told apart."""
        begun = (head.request_id, body.model, head.created, head.index, body.include_usage)
        if parser is None:
            return self.events_class(*begun)
        return completion_events.ToolCallEvents(parser, *begun)


COMPLETION = CompletionEndpoint(
    CompletionRequest,
    openai_bodies.completion,
    openai_bodies.completion_choice,
    completion_events.CompletionEvents,
    DEFAULT_COMPLETION_TOKENS,
)
CHAT = CompletionEndpoint(
    ChatRequest,
    openai_bodies.chat_completion,
    openai_bodies.chat_choice,
    completion_events.ChatEvents,
    None,
)


def make_tool_parser(body: CompletionBody, version: Version, request_id: str) -> ToolParser | None:
    """Return what finds tool calls in a choice's text; None if the body offers no tools."""
    if not isinstance(body, ChatRequest) or not body.offered_tools:
        return None
    call_format = _tool_call_format(body, version)
    assert call_format, "checked on admission"
    parallel = body.parallel_tool_calls is not False
    return ToolParser(call_format, request_id, parallel, body.offered_names)


def _tool_call_format(body: ChatRequest, version: Version) -> ToolCallFormat | None:
    """The format in which the version writes tool calls for this body."""
    if isinstance(body.tool_choice, NamedToolChoice):
        return forced_function_format(body.tool_choice.name)
    return FORCED_CALLS if body.forces_tools else detect_format(version.chat_template)

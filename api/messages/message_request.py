"""Bodies of /v1/messages and /v1/messages/count_tokens, each of which is a chat in other words."""

from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from api.messages.content_blocks import (
    JsonBody,
    Message,
    MessageTool,
    Texts,
    to_chat_messages,
    to_parts,
)
from api.schemas.chat_messages import MAX_MESSAGES
from api.schemas.completions import ChatRequest
from api.schemas.fields import (
    INT32,
    Body,
    Count,
    Ignored,
    InferenceBody,
    JsonObject,
    ModelName,
    OnlyValues,
    Stops,
)
from api.schemas.parsing import parse
from api.schemas.tools import MAX_TOOLS
from streams.errors import BadRequest, UnsupportedValue

_BLOCKS_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use"),
    "system": ("text",),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NoThinking = Annotated[Any, OnlyValues(None, {"type": "disabled"})]


class MessageToolChoice(Body):
    """Choice of whether the answer must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "MessageToolChoice":
        if (self.name is None) == (self.type == "tool"):
            raise BadRequest(
                "tool_choice has a name for the type 'tool', and only then", "tool_choice.name"
            )
        return self

    def to_choice(self) -> str | JsonBody:
        """Return the `tool_choice` of a chat's body."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return _CHOICES[self.type]


class JsonFormat(Body):
    """A JSON schema that the answer must follow."""

    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")

    def to_response_format(self) -> JsonBody:
        """Return the `response_format` of a chat's body."""
        named = {"name": "output", "schema": self.json_schema}
        return {"type": "json_schema", "json_schema": named}


class OutputConfig(Body):
    """The form of the answer, and how much effort it is worth."""

    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="for chat templates that read it"
    )


class Metadata(Body):
    """Facts that the client tells of a request beside the conversation."""

    user_id: str | None = None


class PromptBody(Body):
    """The fields of a body that make up the prompt; the body of /v1/messages/count_tokens."""

    model: ModelName
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="only if the model's chat template supports tools"
    )
    tool_choice: MessageToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: NoThinking = None
    cache_control: Ignored = None

    @model_validator(mode="after")
    def _check_messages(self) -> "PromptBody":
        for index, message in enumerate(self.messages):
            allowed = _BLOCKS_OF_ROLE[message.role]
            if wrong := [block.type for block in message.content if block.type not in allowed]:
                field = f"messages[{index}].content"
                raise BadRequest(f"{field} of role {message.role!r} has a {wrong[0]}", field)
        if self.messages[-1].role == "assistant":
            reason = "messages end with the assistant's, and an answer cannot be begun for it"
            raise UnsupportedValue(reason, "messages")
        return self

    @cached_property
    def chat(self) -> ChatRequest:
        """The same as a body of /v1/chat/completions.

        Turns of one role that follow each other are one. Raises `BadRequest` for fields that
        contradict each other.
        """
        return parse(ChatRequest, self._to_chat())

    def _to_chat(self) -> JsonBody:
        system = [{"role": "system", "content": to_parts(self.system)}] if self.system else []
        turns = [
            message
            for role, group in groupby(self.messages, lambda each: each.role)
            for message in to_chat_messages(role, [block for m in group for block in m.content])
        ]
        choice, output = self.tool_choice, self.output_config or OutputConfig()
        return {
            "model": self.model,
            "messages": system + turns,
            "tools": [tool.to_tool() for tool in self.tools or ()],
            "tool_choice": choice and choice.to_choice(),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "response_format": output.format and output.format.to_response_format(),
            "reasoning_effort": "xhigh" if output.effort == "max" else output.effort,
        }


class MessagesRequest(PromptBody, InferenceBody):
    """Body of /v1/messages."""

    max_tokens: Count
    stop_sequences: Stops = Field(default=[])
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=INT32)
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        default=None, description="accepted and ignored"
    )

    def _to_chat(self) -> JsonBody:
        return super()._to_chat() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
            "user": self.metadata and self.metadata.user_id,
            "priority": self.priority,
            "deadline_ms": self.deadline_ms,
        }

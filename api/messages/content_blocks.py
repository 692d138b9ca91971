"""Content blocks and tools in Anthropic's shape, and what they are in a chat. Pure."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from api.schemas.fields import (
    Body,
    Ignored,
    JsonObject,
    OnlyFalse,
    OnlyNull,
    OnlyNullOrEmpty,
    OnlyValues,
    describe_value,
    unsupported_value,
)
from api.schemas.tools import FUNCTION_NAME

JsonBody = dict[str, Any]
Role = Literal["user", "assistant", "system"]
_BLOCK_TYPES = ("text", "tool_use", "tool_result")
CustomOnly = Annotated[Any, OnlyValues(None, "custom")]


def _to_blocks(value: object) -> object:
    """Return a text as a block; raise for a block of a type that is not supported."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        for block in value:
            kind = block.get("type", "text") if isinstance(block, dict) else "text"
            if kind not in _BLOCK_TYPES:
                raise unsupported_value(
                    f"has a block of type {describe_value(kind)}, "
                    "only text, tool_use and tool_result are supported"
                )
    return value


class TextBlock(Body):
    """A text in a message, a system prompt or the result of a tool."""

    type: Literal["text"]
    text: str
    citations: OnlyNullOrEmpty = None
    cache_control: Ignored = None

    def to_part(self) -> JsonBody:
        """Return the part of a chat message's content that it is."""
        return {"type": "text", "text": self.text}


Texts = Annotated[
    list[TextBlock], BeforeValidator(_to_blocks, json_schema_input_type=str | list[TextBlock])
]


class ToolUseBlock(Body):
    """A call of a tool, in a message of the assistant's."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    caller: Ignored = None
    toolset_name: OnlyNull = None
    cache_control: Ignored = None

    def to_call(self) -> JsonBody:
        """Return the tool call of a chat message that it is."""
        function = {"name": self.name, "arguments": json.dumps(self.input)}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(Body):
    """Result of a tool, in a message of the user's."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default=[])
    is_error: bool | None = Field(default=None, description="accepted and ignored")
    cache_control: Ignored = None

    def to_message(self) -> JsonBody:
        """Return the chat message that it is."""
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": to_parts(self.content),
        }


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Body):
    """One turn of the conversation, or a part of one."""

    role: Role
    content: Annotated[
        list[Block], BeforeValidator(_to_blocks, json_schema_input_type=str | list[Block])
    ]


class MessageTool(Body):
    """A tool that the client runs; those that a server runs are not supported."""

    type: CustomOnly = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: JsonObject = Field(description="a JSON schema")
    strict: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    defer_loading: OnlyFalse = None
    cache_control: Ignored = None

    def to_tool(self) -> JsonBody:
        """Return the tool in the shape of a chat's body."""
        function = {"name": self.name, "parameters": self.input_schema}
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": function | described}


def to_parts(blocks: Iterable[object]) -> list[JsonBody]:
    """Return the texts among some blocks as parts of a chat message's content."""
    return [block.to_part() for block in blocks if isinstance(block, TextBlock)]


def to_chat_messages(role: Role, blocks: Sequence[Block]) -> Iterator[JsonBody]:
    """Yield the chat messages that one turn is: results of tools first, then its text and calls.

    The role decides which blocks count; others are left out, so check them before.
    """
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield block.to_message()
    calls = [block.to_call() for block in blocks if isinstance(block, ToolUseBlock)]
    texts = to_parts(blocks)
    if texts or calls or not blocks:
        yield {"role": role, "content": texts, **({"tool_calls": calls} if calls else {})}

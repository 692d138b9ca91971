"""Chat messages: checked as clients write them, and converted to what chat templates expect."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from api.schemas.fields import (
    MAX_VALUES,
    Body,
    Ignored,
    OnlyNull,
    check_plain_json,
    wrong_value,
)
from api.schemas.payload_element_limit import has_more
from api.schemas.text_content import TextParts, parse_text_content

MAX_MESSAGES = 4096
MAX_CALLS = 128
Role = Literal["system", "developer", "user", "assistant", "tool"]
_TEXT_FIELDS = {"text": "text", "refusal": "refusal"}  # by the type of a part
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


def _parse_content(value: object) -> str | TextParts:
    """Return the text or the parts; null, which assistants send, and no parts are an empty text."""
    if not value and (value is None or isinstance(value, list)):
        return ""
    return parse_text_content(value, _TEXT_FIELDS, ("cache_control",))


Content = Annotated[
    str | TextParts,
    PlainValidator(_parse_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


def _check_arguments(value: str) -> str:
    """Check that the text is a JSON object, or empty: templates expect an object."""
    if has_more(value.encode(errors="replace"), (b"{", b"[", b","), MAX_VALUES):
        raise wrong_value(f"holds more than {MAX_VALUES} values")
    try:
        parsed = json.loads(value or "{}")
        json.dumps(parsed, ensure_ascii=False).encode()  # a ValueError for a lone surrogate
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise wrong_value("must be a JSON object as text")
    check_plain_json(parsed)
    return value


class CalledFunction(Body):
    """The function that an assistant message calls, and its arguments as JSON text."""

    name: str
    arguments: Annotated[str, AfterValidator(_check_arguments)]
    parsed_arguments: Ignored = None


class CalledTool(Body):
    """A tool call in an assistant message of the chat so far."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Ignored = None

    def to_template(self) -> dict[str, Any]:
        """Return the call in the shape that chat templates expect.

        That is OpenAI's shape, but with the arguments as an object instead of JSON text.
        """
        arguments = json.loads(self.function.arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


CalledTools = Annotated[list[CalledTool], Field(max_length=MAX_CALLS, fail_fast=True)]


class ChatMessage(Body):
    """One message of a chat. A message from a response may be sent back unchanged later.

    `parsed`, `index` and `parsed_arguments` are fields that SDKs add to an answer that they have
    parsed; they are ignored.
    """

    role: Role
    content: Content
    name: str | None = Field(default=None, description="ignored unless the role is `tool`")
    tool_calls: CalledTools | None = None
    tool_call_id: str | None = None
    refusal: str | None = Field(default=None, description="the text, of a message without content")
    reasoning_content: str | None = Field(
        default=None, description="only for chat templates that show earlier reasoning"
    )
    audio: OnlyNull = None
    function_call: OnlyNull = None
    annotations: Ignored = None
    cache_control: Ignored = None
    parsed: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _add_missing_content(cls, value: Any) -> Any:
        """Make `content` optional for a message with tool calls or a refusal."""
        if isinstance(value, dict) and (value.get("tool_calls") or value.get("refusal")):
            return {"content": None, **value}
        return value

    @model_validator(mode="after")
    def _check_fields_of_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise wrong_value("has tool_calls, which only an assistant has")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise wrong_value("must have a tool_call_id if it is a tool's, and only then")
        return self

    def to_template(self) -> dict[str, Any]:
        """Return the message in the shape that chat templates expect.

        The role `developer` becomes `system`, the name by which templates know that role. A message
        without content has its `refusal` as text. A `name` is kept only for the role `tool`.
        """
        role = "system" if self.role == "developer" else self.role
        parsed: dict[str, Any] = {"role": role, "content": self.content or self.refusal or ""}
        if self.reasoning_content:
            parsed["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            parsed["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.role == "tool":
            parsed["tool_call_id"] = self.tool_call_id
            parsed |= {"name": self.name} if self.name else {}
        return parsed


Chat = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

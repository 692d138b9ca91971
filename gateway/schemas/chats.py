"""Chat messages as strangers write them, and as templates want them."""

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from gateway.schemas.fields import Body, Nothing, NothingListed, shown, unsupported, wrong

Role = Literal["system", "developer", "user", "assistant"]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


def _content(value: object) -> str:
    """A text, or the texts of its parts joined; null is an assistant's way to say nothing."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text, value))
    raise wrong(f"must be a text or a list of parts, not {shown(value)}")


def _text(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise wrong("must have parts that are objects with a type")
    if kind != "text":
        raise unsupported(f"has a part of type {shown(kind)}, only 'text' is supported")
    if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise wrong("has a part of type 'text' that is not a text and nothing else")
    return part["text"]


Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


class ChatMessage(Body):
    """One turn of a chat. What an answer of ours holds may be sent back as it is."""

    role: Role
    content: Content
    name: str | None = Field(default=None, description="accepted and ignored")
    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    tool_calls: NothingListed = None
    annotations: NothingListed = None

    def plain(self) -> dict[str, str]:
        """What templates know; a `developer` is what was called `system` before."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


Chat = Annotated[list[ChatMessage], Field(min_length=1)]

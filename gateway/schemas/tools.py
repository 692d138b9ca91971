"""Tools that a chat may call: as strangers describe them, and what forces a model to call one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from gateway.schemas.fields import Body, Ignored, PlainObject, shown, unsupported, wrong
from streams.messages import Grammar

MAX_TOOLS = 128
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(Body):
    """What a model may call."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: PlainObject | None = Field(default=None, description="a JSON schema")
    strict: Ignored = None


class Tool(Body):
    """A tool, of which functions are the only kind."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """What chat templates know."""
        said = vars(self.function).items()  # `model_dump` copies every value of the parameters
        function = {name: value for name, value in said if name != "strict" and value is not None}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Named:
    """The wish that one function be called, whatever the model thinks."""

    name: str


def _choice(value: object) -> str | Named | None:
    """A word, or the name of a function: `{"type": "function", "function": {"name": ...}}`."""
    if value is None or value in ("none", "auto", "required"):
        return value
    match value:
        case {"type": "function", "function": {"name": str(name), **rest}, **others}:
            if not rest and set(others) <= {"type"}:
                return Named(name)
        case {"type": str(kind)} if kind != "function":
            raise unsupported(f"has the type {shown(kind)}, only 'function' is supported")
    raise wrong(f"must be 'none', 'auto', 'required' or a named function, not {shown(value)}")


_NAMED_SCHEMA = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    },
}
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Annotated[
    str | Named | None,
    PlainValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_SCHEMA]}),
]


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_of(function: Function) -> Grammar:
    """The arguments of a call of this function."""
    return Grammar("json_schema", json.dumps(function.parameters or _NO_PARAMETERS))


def calls_of(functions: Sequence[Function], parallel: bool) -> Grammar:
    """A list of calls, `[{"name": ..., "arguments": {...}}, ...]`, of one if not `parallel`."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        **({} if parallel else {"maxItems": 1}),
        "items": {"anyOf": [_call(each, f"#/$defs/{i}") for i, each in enumerate(functions)]},
        "$defs": {
            str(i): _moved(each.parameters or _NO_PARAMETERS, f"#/$defs/{i}")
            for i, each in enumerate(functions)
        },
    }
    return Grammar("json_schema", json.dumps(schema))


def _call(function: Function, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(node: Any, place: str) -> Any:
    """A schema that has become a part of another: what it refers to within itself is there too."""
    if isinstance(node, list):
        return [_moved(each, place) for each in node]
    if not isinstance(node, dict):
        return node
    moved = {name: _moved(value, place) for name, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved

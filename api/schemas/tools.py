"""Tools that a chat may call: as strangers describe them, and what forces a model to call one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from api.schemas.fields import (
    Body,
    Ignored,
    JsonObject,
    describe_value,
    unsupported_value,
    wrong_value,
)
from streams.messages import Grammar

MAX_TOOLS = 128
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(Body):
    """What a model may call."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: JsonObject | None = Field(default=None, description="a JSON schema")
    strict: Ignored = None


class Tool(Body):
    """A tool, of which functions are the only kind."""

    type: Literal["function"]
    function: Function

    def to_template(self) -> dict[str, Any]:
        """What chat templates know."""
        said = vars(self.function).items()  # `model_dump` copies every value of the parameters
        function = {name: value for name, value in said if name != "strict" and value is not None}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class NamedToolChoice:
    """The wish that one function be called, whatever the model thinks."""

    name: str


def _parse_choice(value: object) -> str | NamedToolChoice | None:
    """A word, or the name of a function: `{"type": "function", "function": {"name": ...}}`."""
    if value is None or value in ("none", "auto", "required"):
        return value
    match value:
        case {"type": "function", "function": {"name": str(name), **rest}, **others}:
            if not rest and set(others) <= {"type"}:
                return NamedToolChoice(name)
        case {"type": str(kind)} if kind != "function":
            raise unsupported_value(
                f"has the type {describe_value(kind)}, only 'function' is supported"
            )
    raise wrong_value(
        f"must be 'none', 'auto', 'required' or a named function, not {describe_value(value)}"
    )


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
    str | NamedToolChoice | None,
    PlainValidator(_parse_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_SCHEMA]}),
]


_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_grammar(function: Function) -> Grammar:
    """The arguments of a call of this function."""
    return Grammar("json_schema", json.dumps(function.parameters or _NO_PARAMETERS))


def calls_grammar(functions: Sequence[Function], parallel: bool) -> Grammar:
    """A list of calls, `[{"name": ..., "arguments": {...}}, ...]`, of one if not `parallel`."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        **({} if parallel else {"maxItems": 1}),
        "items": {
            "anyOf": [_call_schema(each, f"#/$defs/{i}") for i, each in enumerate(functions)]
        },
        "$defs": {
            str(i): _rebase_references(each.parameters or _NO_PARAMETERS, f"#/$defs/{i}")
            for i, each in enumerate(functions)
        },
    }
    return Grammar("json_schema", json.dumps(schema))


def _call_schema(function: Function, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _rebase_references(node: Any, place: str) -> Any:
    """A schema that has become a part of another: what it refers to within itself is there too."""
    if isinstance(node, list):
        return [_rebase_references(each, place) for each in node]
    if not isinstance(node, dict):
        return node
    moved = {name: _rebase_references(value, place) for name, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved

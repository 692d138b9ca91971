"""Tools that a chat may call, as clients describe them, and the grammars that force a call."""

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
FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(Body):
    """A function that a model may call."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: JsonObject | None = Field(default=None, description="a JSON schema")
    strict: Ignored = None


class Tool(Body):
    """A tool that a model may call; functions are the only kind."""

    type: Literal["function"]
    function: Function

    def to_template(self) -> dict[str, Any]:
        """Return the tool in the shape that chat templates expect.

        That is OpenAI's shape without `strict` and without fields that are null.
        """
        fields = vars(self.function).items()  # `model_dump` copies every value of the parameters
        function = {name: value for name, value in fields if name != "strict" and value is not None}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class NamedToolChoice:
    """A `tool_choice` that forces a call of the function `name`."""

    name: str


def _parse_choice(value: object) -> str | NamedToolChoice | None:
    """Return a `tool_choice`: a word, or the function named by OpenAI's object.

    The object is `{"type": "function", "function": {"name": ...}}`.
    """
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
    """Return the grammar of a JSON object of arguments for one call of `function`.

    For a function that declares no parameters, only an empty object is allowed.
    """
    return Grammar("json_schema", json.dumps(function.parameters or _NO_PARAMETERS))


def calls_grammar(functions: Sequence[Function], parallel: bool) -> Grammar:
    """Return the grammar of a JSON list of calls, `[{"name": ..., "arguments": {...}}, ...]`.

    Each call must be of one of `functions`, with arguments by its schema. The list has one or more
    calls if `parallel` is True, else exactly one.
    """
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
    """Return a schema whose references to parts of itself hold where it is embedded, at `place`."""
    if isinstance(node, list):
        return [_rebase_references(each, place) for each in node]
    if not isinstance(node, dict):
        return node
    moved = {name: _rebase_references(value, place) for name, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved

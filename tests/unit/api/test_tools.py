"""Tools in a chat's body: what is offered, what is forced, and calls that are sent back."""

import json
from typing import Any

import pytest

from api.schemas.completions import ChatRequest
from api.schemas.fields import MAX_VALUES
from api.schemas.parsing import parse
from streams.errors import BadRequest
from streams.messages import Sampling

LONG = json.dumps({"a": [1] * (MAX_VALUES + 1)})
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, {**CHAT, **fields})


def refusal(fields: dict[str, Any]) -> tuple[str, str | None]:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    return refused.value.code, refused.value.field


def called(arguments: str) -> dict[str, Any]:
    """A call in an earlier answer."""
    return {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_calls_and_their_results_may_be_sent_back() -> None:
    """An agent's next request; templates want arguments as an object, and call ids as they were."""
    messages: list[Any] = [
        {"role": "assistant", "tool_calls": [called('{"at": "sea"}'), called("")]},
        {"role": "tool", "tool_call_id": "1", "content": "blue", "name": "look"},
    ]
    look = {"name": "look", "arguments": {"at": "sea"}}
    assert chat(messages=messages).template_messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": look},
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "blue", "tool_call_id": "1", "name": "look"},
    ]


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LOOK, GO = tool("look", type="object"), tool("go", type="object")


def test_tools_are_offered_as_they_were_described() -> None:
    """Their special tokens must survive then: some models mark calls with them."""
    described = {**LOOK, "function": {**LOOK["function"], "description": "d", "strict": True}}
    body = chat(tools=[described], tool_choice="auto")
    assert body.offered_tools == [{**LOOK, "function": {**LOOK["function"], "description": "d"}}]
    assert body.to_sampling() == Sampling(0, skip_special_tokens=False)
    assert chat(tools=[LOOK], tool_choice="none").offered_tools is None
    assert chat(tools=[]).to_sampling() == Sampling(0)


def schema(**fields: Any) -> dict[str, Any]:
    """The JSON schema that a chat's output must follow."""
    grammar = chat(**fields).to_sampling().grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    found: dict[str, Any] = json.loads(grammar.source)
    return found


def test_a_forced_call_is_forced_by_a_grammar() -> None:
    """Asking nicely is what `auto` does."""
    named = {"type": "function", "function": {"name": "go"}}
    assert schema(tools=[LOOK, GO], tool_choice=named) == {"type": "object"}
    any_of = schema(tools=[LOOK, GO], tool_choice="required")
    names = [call["properties"]["name"] for call in any_of["items"]["anyOf"]]
    assert names == [{"const": "look"}, {"const": "go"}]
    assert (any_of["minItems"], any_of.get("maxItems")) == (1, None)
    one = schema(tools=[LOOK], tool_choice="required", parallel_tool_calls=False)
    assert one["maxItems"] == 1


def test_a_function_without_parameters_takes_none() -> None:
    """OpenAI lets them be left out."""
    bare = {"type": "function", "function": {"name": "go"}}
    assert schema(tools=[bare], tool_choice=bare)["additionalProperties"] is False


def test_references_within_parameters_still_lead_somewhere() -> None:
    """Pydantic writes `$defs`; they have moved into a larger schema."""
    tree = {"$ref": "#/$defs/Tree"}
    parameters = {
        "type": "object",
        "properties": {"root": tree, "$ref": {"type": "string"}},
        "$defs": {"Tree": {"type": "object", "properties": {"below": tree, "all": {"$ref": "#"}}}},
    }
    whole = schema(tools=[LOOK, tool("grow", **parameters)], tool_choice="required")
    (reference,) = {
        call["properties"]["arguments"]["$ref"]
        for call in whole["items"]["anyOf"]
        if call["properties"]["name"]["const"] == "grow"
    }
    assert reference == "#/$defs/1"
    moved = whole["$defs"]["1"]
    assert moved["properties"]["root"] == {"$ref": "#/$defs/1/$defs/Tree"}
    assert moved["properties"]["$ref"] == {"type": "string"}
    assert moved["$defs"]["Tree"]["properties"]["all"] == {"$ref": "#/$defs/1"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("two words")]}, "tools[0].function.name"),
        ({"tools": [LOOK] * 129}, "tools"),
        ({"tools": [LOOK], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": GO}, "tool_choice"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "go"}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_a_wrong_tool_is_told_with_its_field(fields: dict[str, Any], field: str) -> None:
    """As every other mistake."""
    assert refusal(fields) == ("invalid_request", field)


@pytest.mark.parametrize("arguments", ["{", "[]", '{"x": "\\ud800"}', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    """A template would fail on them, or a tokeniser."""
    message = {"role": "assistant", "tool_calls": [called(arguments)]}
    place = "messages[0].tool_calls[0].function.arguments"
    assert refusal({"messages": [message]}) == ("invalid_request", place)


def test_only_an_assistant_calls() -> None:
    """What a template would make of it otherwise nobody knows."""
    message = {"role": "user", "content": "x", "tool_calls": [called("{}")]}
    assert refusal({"messages": [message]}) == ("invalid_request", "messages[0]")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool("look", enum=[1] * MAX_VALUES)]},
        {"tools": [tool("look", enum=[[1] * 1000] * 40)]},
        {"messages": [{"role": "assistant", "tool_calls": [called(LONG)]}]},
        {"messages": [{"role": "assistant", "tool_calls": [called("[" * MAX_VALUES + "1,")]}]},
    ],
)
def test_parameters_and_arguments_hold_no_more_values_than_a_schema_may(
    fields: dict[str, Any],
) -> None:
    """Each value is looked at, and templates write each out."""
    with pytest.raises(BadRequest, match=f"holds more than {MAX_VALUES} values"):
        chat(**fields)


def test_long_arguments_of_few_values_are_taken() -> None:
    """An agent sends back the file that it wrote, whatever is in it."""
    file = '{"a": [1, 2]}\\' * MAX_VALUES
    arguments = json.dumps({"path": "a", "content": file})
    (said,) = chat(
        messages=[{"role": "assistant", "tool_calls": [called(arguments)]}]
    ).template_messages
    assert said["tool_calls"][0]["function"]["arguments"]["content"] == file

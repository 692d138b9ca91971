"""Structured outputs: forms that may be asked for, and those refused before they are queued."""

import json
import re
from typing import Any

import pytest

from api.schemas.completions import ChatRequest, CompletionRequest
from api.schemas.parsing import parse
from api.schemas.websocket_frames import GenerateSubmission
from streams.errors import BadGrammar, BadRequest
from streams.grammars.llguidance_grammar import MAX_CHARACTERS, check_grammar
from streams.messages import Grammar, Request, Sampling

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def grammar(**fields: Any) -> Grammar | None:
    return parse(ChatRequest, CHAT | fields).to_sampling().grammar


def test_formats_become_grammars() -> None:
    """OpenAI's words and vLLM's, one form on the wire."""
    schema = Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))
    assert grammar() is grammar(response_format={"type": "text"}) is None
    assert grammar(response_format={"type": "json_object"}) == Grammar("json_object")
    assert grammar(response_format=FORMAT) == schema
    assert grammar(structured_outputs={"json": SCHEMA}) == schema
    assert grammar(structured_outputs={"json": json.dumps(SCHEMA, indent=1)})
    assert grammar(structured_outputs={"regex": "a+"}) == Grammar("regex", "a+")
    both = {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}}
    assert grammar(**both) == Grammar("regex", "a+")


@pytest.mark.parametrize("body", [CompletionRequest, GenerateSubmission])
def test_every_door_takes_them(body: type[CompletionRequest]) -> None:
    """Completions, frames and producers as well as chats."""
    wire = {"model": "m", "prompt": "x", "response_format": FORMAT}
    assert parse(body, wire).to_sampling().grammar == grammar(response_format=FORMAT)


def test_choices_match_themselves_alone() -> None:
    """Whatever characters they have."""
    choices = ["a.b", "x|y", '(/\n"ü']
    made = grammar(structured_outputs={"choice": choices})
    assert made
    check_grammar(made)
    pattern = re.sub(r"\\x{(\w+)}", lambda m: re.escape(chr(int(m[1], 16))), made.source)
    assert [re.fullmatch(pattern, choice) is not None for choice in choices] == [True] * 3
    assert re.fullmatch(pattern, "axb") is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": FORMAT | {"type": "json_object"}}, "response_format.json_schema"),
        (
            {"response_format": FORMAT | {"json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": FORMAT | {"json_schema": {"name": "n n", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_what_is_no_format_is_told_with_its_field(fields: dict[str, Any], field: str) -> None:
    """Like every other field."""
    with pytest.raises(BadRequest) as refused:
        grammar(**fields)
    assert refused.value.field == field


def test_a_grammar_survives_the_wire() -> None:
    """With everything else that a sampling may have."""
    sampling = Sampling(grammar=Grammar("regex", "a"), logit_bias=[(7, 1.5)], min_p=0.1)
    request = Request.unpack(Request("generate", sampling=sampling).pack())
    assert request.sampling.grammar == sampling.grammar
    assert [tuple(pair) for pair in request.sampling.logit_bias] == sampling.logit_bias


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(" * 1000 + "a" + ")*" * 1000, "nested"),
        ("json_schema", "[", "not JSON"),
        ("json_schema", "7", "schema"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "recursion"),
        ("json_schema", '{"type": "integer", "multipleOf": 99999999}', "99999999"),
        ("json_schema", '{"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}', "multipleOf"),
        ("json_schema", '{"type": "number", "multipleOf": 1e-9}', "1e-09"),
        ("json_schema", '"' + "x" * MAX_CHARACTERS + '"', str(MAX_CHARACTERS)),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    kind: Any, source: str, words: str
) -> None:
    """A 400 at the door, instead of a failure after the queue; never a worker that hangs."""
    with pytest.raises(BadGrammar, match=re.escape(words)) as refused:
        check_grammar(Grammar(kind, source))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {},
        SCHEMA,
        {"type": "number", "multipleOf": 0.01},
        {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "$ref": "#/$defs/n"},
        {"type": "string", "format": "date-time", "title": "T", "description": "D", "default": ""},
    ],
)
def test_what_people_write_is_taken(schema: object) -> None:
    """As pydantic and zod make schemas."""
    check_grammar(Grammar("json_schema", json.dumps(schema)))

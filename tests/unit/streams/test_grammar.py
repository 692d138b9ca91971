"""Grammars: repetition is bounded, nothing unsatisfiable passes, annotations change nothing."""

import json
from typing import Any

import pytest

from streams.errors import BadGrammar
from streams.grammars.llguidance_grammar import check_grammar
from streams.grammars.regex_repetition import count_repeated
from streams.messages import Grammar


def schema(**keywords: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(keywords))


@pytest.mark.parametrize(
    ("pattern", "repeated"),
    [
        ("x{1000}", 999),
        ("(x{10}){10}", 99),
        ("((ab){3}){3,}", 16),
        (r"\p{L}\x{78}{5}", 4),
        ("[a[(b]{7}]{4}", 3),
        (r"\({5}x?", 4),
        ("(x{0,900})*", 0),
        ("(?x)(x{10}) {10}", 99),
        ("x{9}{9}{9}", 728),
    ],
)
def test_copies_are_counted_by_the_least_counts(pattern: str, repeated: int) -> None:
    assert count_repeated(pattern) == repeated


@pytest.mark.parametrize(
    "pattern",
    ["(x{1000}){950}", "x{999999}", "((x{100}){100}){100}", "(?:a|b{30}){400}", "(x{1000}){950,}"],
)
def test_repetition_that_would_stall_an_engine_is_refused_wherever_it_stands(pattern: str) -> None:
    for grammar in (
        Grammar("regex", pattern),
        schema(type="string", pattern=pattern),
        schema(type="object", patternProperties={pattern: {"type": "integer"}}),
        schema(type="array", items={"anyOf": [{"type": "string", "pattern": pattern}]}),
    ):
        with pytest.raises(BadGrammar, match="repetitions multiply"):
            check_grammar(grammar)


def test_a_length_counts_as_repetition_only_with_a_pattern() -> None:
    check_grammar(schema(type="string", minLength=100_000))
    with pytest.raises(BadGrammar, match="repetitions multiply"):
        check_grammar(schema(type="string", minLength=100_000, pattern="^x+$"))


@pytest.mark.parametrize("pattern", ["[0-9]{4}-[0-9]{2}", "(.{1,80}\n){1,40}", "x{5000}"])
def test_usual_repetition_is_taken(pattern: str) -> None:
    check_grammar(Grammar("regex", pattern))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", r"[^\s\S]"),
        Grammar("regex", r"ab[^\s\S]"),
        schema(**{"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}),
        schema(type="integer", minimum=5, maximum=3),
        schema(type="object", properties={"a": {"enum": []}}, required=["a"]),
        schema(allOf=[{"type": "string"}, {"type": "integer"}]),
    ],
)
def test_a_grammar_that_nothing_can_follow_is_refused(grammar: Grammar) -> None:
    with pytest.raises(BadGrammar) as refusal:
        check_grammar(grammar)
    assert "NoExtensionBias" not in refusal.value.message


@pytest.mark.parametrize("name", ["path", "password", "binary", "ipv4network", "int32", "x", 7])
def test_an_unknown_format_is_an_annotation(name: object) -> None:
    check_grammar(schema(type="object", properties={"format": {"type": "string", "format": name}}))


@pytest.mark.parametrize("name", ["date-time", "date", "time", "email", "ipv4", "uuid", "uri"])
def test_known_formats_are_still_enforced(name: str) -> None:
    check_grammar(schema(type="string", format=name))
    with pytest.raises(BadGrammar):
        check_grammar(schema(type="string", format=name, pattern=r"^\x01$"))


def test_annotations_are_accepted() -> None:
    check_grammar(
        schema(
            type="object",
            title="A",
            description="d",
            examples=[{"format": "x"}],
            default={},
            deprecated=True,
            readOnly=True,
            writeOnly=False,
            discriminator={"propertyName": "kind"},
            properties={"a": {"type": "string", "contentEncoding": "base64"}},
            **{"$comment": "c", "$schema": "https://json-schema.org/draft/2020-12/schema"},
        )
    )


def test_a_schema_cannot_set_the_compilers_own_settings() -> None:
    check_grammar(schema(type="object", **{"x-guidance": {"no_such_setting": 1}}))

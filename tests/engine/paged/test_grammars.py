"""An output that was promised to have a form has it, whatever the model would rather say."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpu_worker.engines.engine import Output, Sequence
from gpu_worker.engines.paged.engine import TransformersEngine
from streams.messages import Grammar, Sampling
from tests.engine.tiny_models import CONTEXT, END, Results, engine, prompt, run_to_end

MOST = CONTEXT - 10
TEXT = {"type": "string", "maxLength": 4}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "tags": {"type": "array", "items": TEXT, "maxItems": 2}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
REGEX = Grammar("regex", r"[a-f]{3,5}-\d{2}(x|yy)")


def sampling(grammar: Grammar | None, seed: int = 1, **more: Any) -> Sampling:
    return Sampling(MOST, temperature=1, seed=seed, grammar=grammar, **more)


def schema(wanted: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(wanted))


@pytest.fixture(scope="module")
def shared() -> TransformersEngine:
    """One for all that leave nothing behind."""
    return engine()


def run(shared: TransformersEngine, grammar: Grammar, **more: Any) -> tuple[str, Output]:
    results = run_to_end(shared, [Sequence("a", prompt(3, 9), sampling(grammar, **more))])
    return results.text["a"], results.terminals["a"]


leaves = st.sampled_from(
    [
        TEXT,
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 999},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"enum": ["red", 'with "quotes"', 3, None]},
        {"const": {"a": [1]}},
        {"type": "string", "pattern": "^[a-z]{1,3}$"},
    ]
)


def _above(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(properties: dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(properties),
            "additionalProperties": False,
        }

    names = st.sampled_from(["a", "key", "ü"])
    arrays = inner.map(lambda items: {"type": "array", "items": items, "maxItems": 2})
    either = st.lists(inner, min_size=2, max_size=2).map(lambda some: {"anyOf": some})
    return arrays | either | st.dictionaries(names, inner, max_size=2).map(made)


KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": int | float,
}


def holds(wanted: dict[str, Any], value: Any) -> bool:
    """Whether a value satisfies a schema, as far as those above go."""
    if "anyOf" in wanted:
        return any(holds(each, value) for each in wanted["anyOf"])
    if "enum" in wanted or "const" in wanted:
        return value in wanted.get("enum", [wanted.get("const")])
    return isinstance(value, KINDS[wanted["type"]]) and _fits(wanted, value)


def _fits(wanted: dict[str, Any], value: Any) -> bool:
    if isinstance(value, dict):
        properties = wanted["properties"]
        return value.keys() == properties.keys() and all(
            holds(properties[name], each) for name, each in value.items()
        )
    if isinstance(value, list):
        return len(value) <= wanted["maxItems"] and all(holds(wanted["items"], v) for v in value)
    if isinstance(value, str):
        return re.fullmatch(wanted.get("pattern", "(?s).{0,4}"), value) is not None
    return (
        value is None or "minimum" not in wanted or wanted["minimum"] <= value <= wanted["maximum"]
    )


@given(wanted=st.recursive(leaves, _above, max_leaves=4), seed=st.integers(0, 2**32))
@example(wanted={"type": "array", "items": TEXT, "maxItems": 2}, seed=131)  # "!" is also the end
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_output_with_a_schema_parses_and_satisfies_it(
    shared: TransformersEngine, wanted: dict[str, Any], seed: int
) -> None:
    """Random weights at temperature 1: nothing but the grammar can make it so."""
    text, last = run(shared, schema(wanted), seed=seed)
    assert last.error is None
    if last.finish == "stop":
        assert holds(wanted, json.loads(text))
    else:
        assert last.finish == "length"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "grammar", [schema(PERSON), REGEX, Grammar("regex", r"yes|no|ma\x{79}be\x{20}\x{2f}\x{a}")]
)
def test_a_bounded_grammar_comes_to_its_end(
    shared: TransformersEngine, grammar: Grammar, seed: int
) -> None:
    """Where nothing more may follow the sequence is over: no end of sequence is waited for."""
    text, last = run(shared, grammar, seed=seed)
    assert last.finish == "stop"
    if grammar.kind == "regex":
        assert re.fullmatch(re.sub(r"\\x{(\w+)}", _character, grammar.source), text)
    else:
        assert json.loads(text).keys() == {"name", "tags"}


def _character(escaped: re.Match[str]) -> str:
    return re.escape(chr(int(escaped[1], 16)))


def test_any_object_is_an_object(shared: TransformersEngine) -> None:
    """OpenAI's `json_object`; how it begins is all that a random model is sure to get to."""
    text, last = run(shared, Grammar("json_object"))
    assert text.startswith("{")
    assert last.finish == "length" or isinstance(json.loads(text), dict)


def test_the_end_of_sequence_comes_only_where_the_grammar_accepts(
    shared: TransformersEngine,
) -> None:
    """However likely the model finds it."""
    eager = {"logit_bias": [(END, 100.0)]}
    text, last = run(shared, Grammar("regex", "[a-z]{6,}"), **eager)
    assert re.fullmatch("[a-z]{6}", text)
    assert (last.finish, last.tokens) == ("stop", [END])


def test_limits_and_stop_strings_hold_within_a_grammar(shared: TransformersEngine) -> None:
    """They end the text where it is, complete or not."""
    endless = Grammar("regex", "(ab)+")
    banned = [(END, -100.0)]
    text, last = run(shared, endless, stop=["bab"], logit_bias=banned)
    assert (text, last.finish) == ("a", "stop")
    cut = Sampling(7, temperature=1, grammar=endless, logit_bias=banned)
    results = run_to_end(shared, [Sequence("a", prompt(3, 9), cut)])
    assert (results.text["a"], results.terminals["a"].finish) == ("abababa", "length")


def _mixed() -> list[Sequence]:
    wishes = {
        "plain": sampling(None),
        "person": sampling(schema(PERSON)),
        "greedy": replace(sampling(REGEX), temperature=0),
        "object": sampling(Grammar("json_object"), seed=4, presence_penalty=1.0),
        "regex": sampling(REGEX, seed=9, min_p=0.02, logprobs=1),
    }
    return [Sequence(n, prompt(i, 6 + 7 * i), s) for i, (n, s) in enumerate(wishes.items())]


def test_a_mixed_batch_writes_what_each_would_alone_and_behind_a_crash() -> None:
    """Where a sequence stands in its grammar is a function of its tokens."""
    together = run_to_end(engine(), _mixed(), every=2)
    alone = engine()
    for sequence in _mixed():
        name = sequence.request_id
        whole = run_to_end(alone, [sequence])
        assert together.tokens[name] == whole.tokens[name]
        count = len(whole.tokens[name])
        for cut in {1, count // 2, count - 1}:
            resumed = run_to_end(alone, [replace(sequence, generated=whole.tokens[name][:cut])])
            assert resumed.tokens[name] == whole.tokens[name][cut:]
            assert resumed.terminals[name].finish == whole.terminals[name].finish


def test_a_complete_output_is_complete_when_taken_up_again(shared: TransformersEngine) -> None:
    """The attempt that wrote it may have died before it said so."""
    sequence = Sequence("a", prompt(3, 9), sampling(REGEX))
    whole = run_to_end(shared, [sequence]).tokens["a"]
    again = run_to_end(shared, [replace(sequence, generated=whole)])
    assert (again.tokens["a"], again.terminals["a"].finish) == ([], "stop")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (schema({"type": "strin"}), "strin"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", r"(a)\1"), "backreferences"),
        (schema({"type": "integer", "multipleOf": 99_999_999}), "multipleOf"),
        (Grammar("regex", "a" * 70_000), "limit"),
    ],
)
def test_a_bad_grammar_fails_alone(shared: TransformersEngine, bad: Grammar, words: str) -> None:
    """The others go on, and what it held is free again."""
    room = shared.free_capacity()
    results = run_to_end(
        shared,
        [
            Sequence("bad", prompt(1, 5), sampling(bad)),
            Sequence("good", prompt(1, 5), sampling(REGEX)),
        ],
    )
    error = results.terminals["bad"].error
    assert error is not None
    assert error.code == "bad_grammar"
    assert words in str(error)
    assert results.terminals["good"].finish == "stop"
    assert shared.free_capacity() == room


def test_a_grammar_too_costly_to_follow_fails_alone(shared: TransformersEngine) -> None:
    """Found only on the way: the states of this one grow with every character."""
    costly = Grammar("regex", r"(a?){1000}(a{1,1000}){1,1000}")
    results = run_to_end(
        shared,
        [
            Sequence("bad", prompt(1, 5), sampling(costly, logit_bias=[(END, -100.0)])),
            Sequence("good", prompt(1, 5), sampling(None)),
        ],
    )
    assert results.terminals["good"].error is None
    error = results.terminals["bad"].error
    assert error is not None
    assert error.code == "bad_grammar"
    assert "cannot follow" in str(error)


def test_a_sequence_may_leave_while_its_grammar_is_compiled(shared: TransformersEngine) -> None:
    """Cancelled at once, or with others on the same grammar."""
    for name in ("a", "b"):
        shared.add(Sequence(name, prompt(1, 5), sampling(Grammar("regex", "[0-9]{4}"))))
    shared.cancel("a")
    results = Results()
    while not shared.idle:
        results.add(shared.step())
    assert results.terminals["a"].finish == "cancelled"
    assert re.fullmatch("[0-9]{4}", results.text["b"])


def test_more_grammars_than_are_kept_are_compiled_again(shared: TransformersEngine) -> None:
    """What is kept is bounded."""
    for _ in range(2):
        for number in range(70):
            shared.add(Sequence(f"{number}", prompt(1, 5), sampling(Grammar("regex", f"{number}"))))
        results = Results()
        while not shared.idle:
            results.add(shared.step())
        assert results.text == {f"{number}": f"{number}" for number in range(70)}

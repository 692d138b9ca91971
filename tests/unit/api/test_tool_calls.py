"""Calls in generated text: found however it was cut, and never shown as text."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.tool_calls import (
    FORCED_CALLS,
    HERMES,
    LLAMA,
    MISTRAL,
    ParsedDelta,
    ToolCall,
    ToolCallFormat,
    ToolParser,
    detect_format,
    forced_function_format,
)

LOOK = '{"name": "look", "arguments": {"at": "ü <b>"}}'
GO = '{"name": "go", "parameters": {}}'
Call = tuple[str, object]
Calls = list[Call]
LOOKED: Call = ("look", {"at": "ü <b>"})
GONE: Call = ("go", {})


def parsed(form: ToolCallFormat, pieces: Sequence[str], parallel: bool = True) -> ParsedDelta:
    parser = ToolParser(form, "0123456789abcdef", parallel)
    said = [*map(parser.push, pieces), parser.finish()]
    calls = [call for each in said for call in each.calls]
    assert parser.call_count == len(calls)
    return ParsedDelta("".join(each.text for each in said), calls)


def plain(calls: Sequence[ToolCall]) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{LOOK}\n</tool_call>", "", [LOOKED]),
        (HERMES, f"I look.\n<tool_call>{LOOK}</tool_call>\n", "I look.", [LOOKED]),
        (
            HERMES,
            f"<tool_call>{LOOK}</tool_call>\n<tool_call>{GO}</tool_call> so",
            " so",
            [LOOKED, GONE],
        ),
        (HERMES, f"<tool_call>{LOOK}", "", [LOOKED]),
        (HERMES, "a < b <tool  \n", "a < b <tool  \n", []),
        (MISTRAL, f"[TOOL_CALLS] [{LOOK}, {GO}]", "", [LOOKED, GONE]),
        (MISTRAL, f"[TOOL_CALLS]{LOOK}", "", [LOOKED]),
        (
            MISTRAL,
            'Well.[TOOL_CALLS]look[ARGS]{"at": "ü <b>"}[TOOL_CALLS]go{}',
            "Well.",
            [LOOKED, GONE],
        ),
        (LLAMA, GO, "", [GONE]),
        (LLAMA, f"\n {GO}; {LOOK}", "", [GONE, LOOKED]),
        (LLAMA, f"<|python_tag|>{GO}", "", [GONE]),
        (LLAMA, f"Here: {GO}", f"Here: {GO}", []),
        (FORCED_CALLS, f"[{LOOK}, {GO}]", "", [LOOKED, GONE]),
        (forced_function_format("look"), '{"at": "ü <b>"}', "", [LOOKED]),
    ],
)
def test_calls_are_found_as_each_family_of_models_writes_them(
    form: ToolCallFormat, text: str, content: str, calls: Calls
) -> None:
    """The text around them stays, the white space that only sets them off does not."""
    said = parsed(form, [text])
    assert (said.text, plain(said.calls)) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "so:\n<tool_call>{'name': 'look'}</tool_call> \n"),
        (HERMES, "<tool_call></tool_call>"),
        (HERMES, '<tool_call>{"name": 7}</tool_call>'),
        (HERMES, '<tool_call>{"name": "look", "arguments": "x"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"x": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"x": "\\ud800"}}</tool_call>'),
        (HERMES, "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        (HERMES, '<tool_call>\n{"name": "look", "argum'),
        (MISTRAL, "[TOOL_CALLS] nothing"),
        (MISTRAL, "[TOOL_CALLS]look[ARGS]{"),
        (LLAMA, ' {"name'),
        (LLAMA, '<|python_tag|>search.call(query="x")'),
        (LLAMA, '{"answer": 42}'),
        (FORCED_CALLS, "[]"),
        (FORCED_CALLS, "just words"),
        (forced_function_format("look"), '{"at": '),
    ],
)
def test_what_is_no_call_is_given_back_as_it_came(form: ToolCallFormat, text: str) -> None:
    """The client sees what the model said; a call that is half right could do harm."""
    assert parsed(form, [text]) == ParsedDelta(text)


PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", LOOK, GO, f"[{GO}]"),
        *("look[ARGS]{}", "a", " ", "\n", "<", "[", "{", "}", "ü☃", ";", '{"name": "x'),
    ]
)
FORMATS = st.sampled_from([HERMES, MISTRAL, LLAMA, FORCED_CALLS, forced_function_format("look")])


@given(FORMATS, st.lists(PARTS).map("".join), st.data(), st.booleans())
def test_it_does_not_matter_where_a_text_is_cut(
    form: ToolCallFormat, text: str, data: st.DataObject, parallel: bool
) -> None:
    """Chunks are cut by chance; a stream says what the whole answer says."""
    cuts = data.draw(st.lists(st.integers(0, len(text))).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(form, pieces, parallel) == parsed(form, [text], parallel)


@given(FORMATS, st.text(alphabet="ab <\n{[T", max_size=30))
@example(HERMES, "a <tool")
def test_text_without_a_call_comes_through_whole(form: ToolCallFormat, text: str) -> None:
    """Nothing is lost of what only looked like the beginning of one."""
    assert parsed(form, list(text)) == ParsedDelta(text)


def test_text_streams_on_while_no_call_can_begin() -> None:
    """Only what may belong to a call is held back."""
    parser = ToolParser(HERMES, "r")
    assert [parser.push(piece).text for piece in ("Hi", " there", " <", "b", ">")] == [
        *("Hi", " there", "", " <b", ">")
    ]


def test_a_call_comes_out_as_soon_as_it_is_whole() -> None:
    """The next one may be seconds away."""
    parser = ToolParser(HERMES, "r")
    parser.push(f"<tool_call>{GO}</tool_ca")
    assert plain(parser.push("ll>\n<tool_").calls) == [GONE]


def test_ids_are_those_that_mistrals_templates_take() -> None:
    """Nine letters and digits; the same for whoever reads the same answer again."""
    said = parsed(MISTRAL, [f"[TOOL_CALLS][{LOOK}, {GO}]"])
    assert [call.id for call in said.calls] == ["012345600", "012345601"]


def test_without_parallel_calls_the_first_one_counts() -> None:
    """`parallel_tool_calls: false`: the client handles one at a time."""
    text = f"<tool_call>{LOOK}</tool_call><tool_call>{GO}</tool_call>"
    assert plain(parsed(HERMES, [text], parallel=False).calls) == [LOOKED]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{{ tools }}", None),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}<tool_call><function=x>{% endif %}", None),
        ("{% if tools %}<tool_call><arg_key>{% endif %}", None),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA),
        ("<|start_header_id|>{% if tools %}{{ '\"parameters\": ' }}{% endif %}", LLAMA),
        ("{% if tools %}{{ '\"parameters\": ' }}{% endif %}", None),
    ],
)
def test_a_template_tells_how_its_model_writes_calls(
    template: str | None, form: ToolCallFormat | None
) -> None:
    """A model that was not taught a way that can be read cannot be given tools."""
    assert detect_format(template) is form


def parsed_of(form: ToolCallFormat, text: str, offered: set[str] | None = None) -> ParsedDelta:
    parser = ToolParser(form, "0123456789abcdef", offered=offered)
    return sum(map(parser.push, text), ParsedDelta()) + parser.finish()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (LLAMA, '{"name": "Bob", "parameters": {}}'),
        (LLAMA, '<|python_tag|>{"name": "Bob", "parameters": {}}'),
        (HERMES, 'so <tool_call>{"name": "Bob", "arguments": {}}</tool_call>'),
        (MISTRAL, "[TOOL_CALLS]Bob{}"),
    ],
)
def test_what_was_not_offered_is_not_called(form: ToolCallFormat, text: str) -> None:
    assert parsed_of(form, text, {"go"}) == ParsedDelta(text)
    assert len(parsed_of(form, text, {"go", "Bob"}).calls) == 1


def test_data_with_a_name_is_not_a_call() -> None:
    data = '{"name": "Bob", "age": 3}'
    assert parsed_of(LLAMA, data) == ParsedDelta(data)


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        (HERMES, '<tool_call>{"name":"f","arguments":{"s":"VALUE"}}</tool_call>', "</tool_call>"),
        (HERMES, '<tool_call>{"name":"f","arguments":{"s":"VALUE"}}', 'a"</tool_call>\\'),
        (MISTRAL, '[TOOL_CALLS]f{"s":"VALUE"}', "[TOOL_CALLS]"),
        (MISTRAL, '[TOOL_CALLS]f{"s":"VALUE"}[TOOL_CALLS]f{"s":"VALUE"}', "[TOOL_CALLS]g{}"),
    ],
)
def test_a_mark_within_a_text_belongs_to_the_text(
    form: ToolCallFormat, text: str, value: str
) -> None:
    calls = parsed_of(form, text.replace("VALUE", json.dumps(value)[1:-1]), {"f"}).calls
    assert calls
    assert {json.loads(call.arguments)["s"] for call in calls} == {value}


def test_a_text_that_never_ends_hides_no_later_call() -> None:
    broken = '<tool_call>{"name": "go", "arguments": {"s": "x}}</tool_call>'
    found = parsed_of(HERMES, f"{broken}<tool_call>{LOOK}</tool_call>")
    assert (found.text, plain(found.calls)) == (broken, [LOOKED])

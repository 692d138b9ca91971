"""Anthropic's messages as chats: what a body becomes, and what its answer and errors are."""

from typing import Any

import orjson
import pytest
from anthropic.types import TextBlock, ToolUseBlock

from api.endpoints.completion_endpoint import CHAT, AnswerHead
from api.messages import message_errors
from api.messages.message_answer import MessageFormat
from api.messages.message_request import MessagesRequest, PromptBody
from api.schemas.parsing import parse
from streams.errors import BadRequest, BrokerUnavailable, Ended, MillstreamError
from streams.messages import openai_usage

HI = {"role": "user", "content": "hi"}
BODY = {"model": "m", "max_tokens": 5, "messages": [HI]}
TOOL = {"name": "look", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}


def chat(**change: Any) -> Any:
    return parse(MessagesRequest, {**BODY, **change}).chat


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_all_fields_of_sampling_reach_the_engine() -> None:
    body = chat(stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=7)
    sampling = body.to_sampling()
    assert (sampling.max_tokens, sampling.stop) == (5, ["a", "b"])
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)


def test_the_user_is_that_of_the_metadata() -> None:
    """It is stored as a hash, as that of a chat."""
    (submission,) = CHAT.to_submissions(chat(metadata={"user_id": "u"}))
    assert submission.end_user == "u"


def test_turns_of_one_role_are_one() -> None:
    """Anthropic joins them, too; many chat templates refuse them otherwise."""
    messages = [HI, {"role": "user", "content": [part("there")]}]
    assert chat(messages=messages, system="brief").template_messages == [
        {"role": "system", "content": [part("brief")]},
        {"role": "user", "content": [part("hi"), part("there")]},
    ]


def test_blocks_go_back_as_the_sdk_dumps_them() -> None:
    """With every field that its classes have, as null."""
    said = TextBlock(type="text", text="I look.")
    use = ToolUseBlock(type="tool_use", id="c1", name="look", input={})
    turn = {"role": "assistant", "content": [said.model_dump(), use.model_dump()]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a mill"}
    roles = [
        message["role"]
        for message in chat(
            messages=[HI, turn, {"role": "user", "content": [result]}]
        ).template_messages
    ]
    assert roles == ["user", "assistant", "tool"]


def test_calls_and_results_are_those_of_a_chat() -> None:
    """Results come before the text of their turn."""
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "ä"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [part("a mill")]}
    messages = [
        HI,
        {"role": "assistant", "content": [part("I look."), use]},
        {"role": "user", "content": [result, part("and now?")]},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "ä"}}}
    assert chat(messages=messages, tools=[TOOL]).template_messages[1:] == [
        {"role": "assistant", "content": [part("I look.")], "tool_calls": [call]},
        {"role": "tool", "content": [part("a mill")], "tool_call_id": "c1"},
        {"role": "user", "content": [part("and now?")]},
    ]


@pytest.mark.parametrize(
    ("choice", "forces", "offers"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "none"}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "look"}, True, True),
    ],
)
def test_a_tool_choice_is_that_of_a_chat(choice: Any, forces: bool, offers: bool) -> None:
    body = chat(tools=[TOOL], tool_choice=choice)
    assert (body.forces_tools, bool(body.offered_tools)) == (forces, offers)
    assert bool(body.grammar) == forces


def test_an_output_format_is_a_grammar() -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "max"}
    body = chat(output_config=config)
    assert body.grammar.kind == "json_schema"
    assert body.template_options == {"reasoning_effort": "xhigh"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking"}]}]},
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_use", "id": "c", "name": "f", "input": {}}
            ]}]},
            "messages[0].content",
        ),
        ({"messages": [HI, {"role": "assistant", "content": "so"}]}, "messages"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": -1}, "top_k"),
        ({"container": "c"}, "container"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**change)
    assert refused.value.field == field


def test_a_count_needs_no_limit() -> None:
    body = parse(PromptBody, {"model": "m", "messages": [HI]})
    assert body.chat.requested_max_tokens is None


def test_a_models_own_stop_string_is_an_end_of_its_turn() -> None:
    """The client has not asked for it and knows nothing of it."""
    end = {"finish_reason": "stop", "stop_sequence": "\nUser:"}
    choice = MessageFormat().choice_of(chat(stop_sequences=["x"]), None, 0, "hi", end, [])
    assert (choice["stop_reason"], choice["stop_sequence"]) == ("end_turn", None)


def test_a_message_without_text_has_no_content() -> None:
    end = {"finish_reason": "stop"}
    events = MessageFormat().start_events(chat(), None, AnswerHead("r", 0, 3))
    usage = openai_usage(3, 1, 2)
    sent = events.opening() + events.text("") + events.finish("stop") + events.ending(usage, end)
    kinds = [line[7:] for line in sent.decode().splitlines() if line.startswith("event: ")]
    assert kinds == ["message_start", "message_delta", "message_stop"]
    assert b'"input_tokens":1,' in sent
    assert b'"cache_read_input_tokens":2' in sent


def test_a_stream_that_fails_ends_in_an_error_event() -> None:
    """The SDK raises on it."""
    events = MessageFormat().start_events(chat(), None, AnswerHead("r", 0, 3))
    head, data = events.failure(Ended("engine_failed", "it broke")).split(b"\ndata: ")
    body = orjson.loads(data)
    assert (head, body["type"], body["request_id"]) == (b"event: error", "error", "r")
    assert body["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("no"), 400, "invalid_request_error"),
        (Ended("model_not_found", "no"), 404, "not_found_error"),
        (Ended("payload_too_large", "no"), 413, "request_too_large"),
        (Ended("insufficient_quota", "no"), 429, "rate_limit_error"),
        (BrokerUnavailable("gone"), 503, "api_error"),
        (Ended("overloaded", "later"), 529, "overloaded_error"),
        (Ended("no_workers", "later"), 529, "overloaded_error"),
        (Ended("deadline_exceeded", "late"), 504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(error: MillstreamError, status: int, kind: str) -> None:
    assert message_errors.error_status(error) == status
    assert message_errors.error_body(error, "r")["error"]["type"] == kind

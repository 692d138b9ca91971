"""Responses: what a client may ask for, the chat that it becomes, and the events that it gets."""

import json
from typing import Any

import pytest
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from api.batches.batch_line import BatchLine, parse_body, render_result, to_submission
from api.openai_bodies import JsonBody
from api.responses.chat_translation import to_chat
from api.responses.response_bodies import (
    ResponseEnd,
    ResponseHead,
    input_item_objects,
    parse_response_id,
    response_id,
)
from api.responses.response_events import ResponseEvents, encode_event
from api.responses.stored_events import iterate_events, result_object
from api.responses.truncation import fit_chat
from api.schemas.parsing import parse
from api.schemas.responses import ResponseRequest
from api.submission.submission_record import Submission
from api.tool_calls import HERMES, ToolParser
from registry.models import mock_model
from streams.errors import BadRequest, ContextLengthExceeded, NotFound, UnsupportedValue
from streams.messages import openai_usage
from streams.records.jobs.item_results import ItemResult, build_result
from streams.subjects import Priority

ID = "0" * 32
USAGE = openai_usage(3, 9)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def request(**body: Any) -> ResponseRequest:
    return parse(ResponseRequest, {"model": "mock", "input": "hi", **body})


def head(**body: Any) -> ResponseHead:
    return ResponseHead(ID, 1, request(**body))


def test_items_become_messages_of_a_chat() -> None:
    """Instructions come first; a call joins the message of the assistant before it."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "how is it?"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": "I look.",
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    chat = to_chat(request(input=items, instructions="be kind", tools=[TOOL]))
    system, user, assistant, tool = chat.template_messages
    assert (system["role"], system["content"]) == ("system", "be kind")
    assert user["content"] == [{"type": "text", "text": "how is it?"}]
    assert assistant["content"] == "I look."
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (tool["tool_call_id"], tool["content"]) == ("c", "sunny")
    assert chat.offered_names == {"f"}


def test_items_go_back_as_the_sdk_dumps_them() -> None:
    """With every field that its classes have, as null."""
    text = ResponseOutputText(annotations=[], text="I look.", type="output_text")
    said = ResponseOutputMessage(
        id="m", role="assistant", status="completed", type="message", content=[text]
    )
    call = ResponseFunctionToolCall(
        arguments="{}", call_id="c", name="f", type="function_call", id="i", status="completed"
    )
    body = request(input=[said.model_dump(), call.model_dump()])
    stored = parse(ResponseRequest, body.model_dump(by_alias=True, exclude_unset=True))
    assert [item.type for item in stored.input] == ["message", "function_call"]


def test_options_are_those_of_the_chat() -> None:
    """Under its names."""
    schema = {"type": "object"}
    chat = to_chat(
        request(
            max_output_tokens=5,
            temperature=0,
            top_logprobs=2,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
            user="u",
            service_tier="flex",
        )
    )
    sampling = chat.to_sampling()
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (5, 0, 2)
    assert sampling.grammar is not None
    assert json.loads(sampling.grammar.source) == schema
    assert (chat.end_user, chat.lane_priority) == ("u", Priority.BATCH)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": [{"type": "reasoning"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    """Rather than answered as if it had not been asked for."""
    with pytest.raises(UnsupportedValue) as refused:
        request(**change)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"background": True, "store": False}, "store"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input",
        ),
        ({"metadata": {"k": 1}}, "metadata.k"),
    ],
)
def test_what_is_wrong_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    """By the client's own name, whichever schema finds it."""
    with pytest.raises(BadRequest) as refused:
        to_chat(request(**change))
    assert refused.value.field == field


@pytest.mark.parametrize("told", ["", "resp_", ID, "resp_x", f"resp_{ID}0", f"resp_{ID}\n"])
def test_what_is_no_id_is_not_found(told: str) -> None:
    """The broker is not asked for it."""
    assert parse_response_id(response_id(ID)) == ID
    with pytest.raises(NotFound):
        parse_response_id(told)


def live(events: ResponseEvents, chunks: list[tuple[int, str]], end: ResponseEnd) -> list[JsonBody]:
    found = events.created() + events.started()
    for count, text in chunks:
        found += events.chunk(count, text, None)
    return found + events.end(end)


def result_of(chunks: list[tuple[int, str]]) -> ItemResult:
    records: list[dict[str, Any]] = [{"type": "started", "attempt": 1, "version": "v1"}]
    records += [{"type": "chunk", "count": count, "text": text} for count, text in chunks]
    done = {"type": "done", "finish_reason": "stop", "usage": USAGE}
    return ItemResult.unpack(build_result(ID, 1, 5_000, records, done).pack())


def test_a_delta_has_the_number_of_its_last_token() -> None:
    """Plus 4; a token without text has no event, and leaves a hole."""
    chunks = [(1, "a"), (2, "bc"), (1, ""), (3, "d")]
    events = live(ResponseEvents(head()), chunks, ResponseEnd.from_finish("stop", USAGE))
    deltas = [e["sequence_number"] for e in events if e["type"].endswith("text.delta")]
    assert deltas == [4, 6, 10]
    assert [e["sequence_number"] for e in events[:4]] == [0, 1, 2, 3]
    assert [e["type"] for e in events[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e["sequence_number"] for e in events[-4:]] == [11, 12, 13, 14]
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == "abcd"
    assert encode_event(events[0]).startswith(b"event: response.created\ndata: {")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_result_gives_the_events_of_its_log(size: int) -> None:
    """With calls of tools, however the text was cut: the same events under the same numbers."""
    text = f"I look.\n{CALL}\n{CALL}"
    chunks = [(1, text[at : at + size]) for at in range(0, len(text), size)]
    asked = head(tools=[TOOL])
    end, result = ResponseEnd.from_finish("stop", USAGE), result_of(chunks)
    seen = live(ResponseEvents(asked, ToolParser(HERMES, ID)), chunks, end)
    again = iterate_events(ResponseEvents(asked, ToolParser(HERMES, ID)), result)
    assert [event for events in again for event in events] == seen
    numbers = [event["sequence_number"] for event in seen]
    assert numbers == sorted(set(numbers))
    output = seen[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert [item["arguments"] for item in output[1:]] == ['{"a": 1}'] * 2


def test_an_end_without_text_says_why() -> None:
    """A failure has no output; a cut one is incomplete."""
    failed = ResponseEvents(head()).end(ResponseEnd.from_failure("engine_failed", "it broke"))
    assert failed[-1]["type"] == "response.failed"
    assert failed[-1]["response"]["output"] == []
    assert failed[-1]["response"]["error"] == {
        "code": "server_error",
        "message": "engine_failed: it broke",
    }
    cut = ResponseEvents(head()).end(ResponseEnd.from_finish("length", USAGE))
    response = cut[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["total_tokens"] == 12


async def fitted(limit: int, count: int) -> list[str]:
    """The texts that stay of turns of a user and an assistant where `limit` messages fit."""
    tries = 0

    async def validate(submission: Submission) -> None:
        nonlocal tries
        tries += 1
        assert submission.chat
        if len(submission.chat) > limit:
            raise ContextLengthExceeded(len(submission.chat), 1, limit, "mock")

    items = [
        {"role": role, "content": f"{role} {turn}"}
        for turn in range(count)
        for role in ("user", "assistant")
    ]
    asked = request(input=[*items[1:], {"role": "user", "content": "last"}], instructions="be kind")
    earlier = request(input=items[:1]).input
    chat = await fit_chat(asked, earlier, validate)
    assert tries <= 2 + count.bit_length()
    return [message["content"] for message in chat.template_messages]


async def test_what_is_too_long_loses_its_beginning() -> None:
    """The fewest items go, up to a message of a user; instructions stay."""
    assert len(await fitted(100, 8)) == 18
    assert await fitted(5, 8) == ["be kind", "user 7", "assistant 7", "last"]
    assert (await fitted(7, 8))[1] == "user 6"
    assert await fitted(2, 8) == ["be kind", "last"]
    with pytest.raises(ContextLengthExceeded):
        await fitted(1, 8)


def test_the_input_is_listed_as_items() -> None:
    """Each item has an id, in any form in which it was written."""
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first, second = input_item_objects(head(input=items))
    assert (first["id"], first["type"]) == (f"item_{ID}_0", "message")
    assert first["content"] == [{"type": "input_text", "text": "a"}]
    assert second["content"][0]["type"] == "output_text"


def test_a_line_of_a_batch_may_be_a_response() -> None:
    """It is not stored: its line is its result."""
    line = BatchLine("a", "/v1/responses", {"model": "mock", "input": "hi"})
    submission = to_submission(line, parse_body(line))
    assert (submission.priority, submission.model) == (Priority.BATCH, "mock")
    shown = json.loads(render_result(line, result_of([(2, "yes")]), mock_model("mock")))
    body = shown["response"]["body"]
    assert (body["object"], body["status"], body["store"]) == ("response", "completed", False)
    assert body == result_object(head(store=False), mock_model("mock"), result_of([(2, "yes")])) | {
        "created_at": 5
    }
    for name, value in (
        ("stream", True),
        ("background", True),
        ("previous_response_id", "resp_"),
        ("truncation", "auto"),
    ):
        with pytest.raises(UnsupportedValue):
            parse_body(BatchLine("a", line.url, {**line.body, name: value}))

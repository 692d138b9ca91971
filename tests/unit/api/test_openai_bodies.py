"""Answers: byte for byte what OpenAI's own client takes for OpenAI's."""

import base64
import struct
from typing import Any

import orjson
import pytest
from openai.types import CreateEmbeddingResponse, Model
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.completion import Completion

from api import error_bodies, openai_bodies
from api.completion_events import ChatEvents, ChoiceEvents, CompletionEvents, ToolCallEvents
from api.tool_calls import HERMES, ToolCall, ToolParser
from registry.models import mock_model
from streams import messages
from streams.errors import (
    BadRequest,
    BrokerUnavailable,
    LaneFull,
    MillstreamError,
    ModelNotFound,
    Unauthenticated,
    UnknownField,
)

USED = messages.openai_usage(3, 4)
LOGPROBS: list[dict[str, Any]] = [
    {"token": 1, "text": "a", "logprob": -0.5, "top": [[1, "a", -0.5], [2, "ü", -1.0]]},
    {"token": 2, "text": "ü", "logprob": -1.5, "top": []},
]
TEXTS = ['say "hi"\n', "", "ü☃\0", "</script>", "\u2028"]


def bodies(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each event; every one ends with an empty line, as the protocol wants."""
    events = stream.split(b"\n\n")
    assert events.pop() == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


def streamed(events: ChoiceEvents) -> list[dict[str, Any]]:
    texts = b"".join(map(events.text, TEXTS))
    return bodies(events.opening() + texts + events.finish("length") + events.usage(USED))


def test_a_completion_is_openais() -> None:
    """Checked by the SDK's own types, log probabilities included."""
    made = Completion.model_validate(
        openai_bodies.completion(
            "r", "m", 5, [openai_bodies.completion_choice(0, "aü", "stop", LOGPROBS)], USED
        ),
        strict=True,
    )
    assert (made.id, made.choices[0].text, made.choices[0].finish_reason) == (
        "cmpl-r",
        "aü",
        "stop",
    )
    assert made.usage
    assert made.usage.total_tokens == 7
    logprobs = made.choices[0].logprobs
    assert logprobs
    assert logprobs.tokens == ["a", "ü"]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs == [{"a": -0.5, "ü": -1.0}, {"ü": -1.5}]


def test_a_chat_completion_is_openais() -> None:
    """As above, in the shape of chats."""
    made = ChatCompletion.model_validate(
        openai_bodies.chat_completion(
            "r", "m", 5, [openai_bodies.chat_choice(0, "aü", "length", LOGPROBS)], USED
        ),
        strict=True,
    )
    assert (made.id, made.choices[0].message.content) == ("chatcmpl-r", "aü")
    logprobs = made.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert [token.bytes for token in logprobs.content] == [[97], [195, 188]]
    assert [t.logprob for t in logprobs.content[0].top_logprobs] == [-0.5, -1.0]


def test_without_log_probabilities_the_field_is_null() -> None:
    """OpenAI sends it, clients look at it."""
    assert openai_bodies.completion_choice(0, "", "stop")["logprobs"] is None
    assert openai_bodies.chat_choice(0, "", "stop")["logprobs"] is None


def test_a_streamed_completion_is_openais() -> None:
    """Any text survives the prepared bytes around it.

    Read as the SDK reads it: OpenAI sends a null `finish_reason` that its own type does not allow.
    """
    chunks = [Completion.construct(**body) for body in streamed(CompletionEvents("r", "m", 5))]
    assert [c.choices[0].text for c in chunks[:-1]] == [*TEXTS, ""]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert {(c.id, c.model, c.created, c.object) for c in chunks} == {
        ("cmpl-r", "m", 5, "text_completion")
    }


def test_a_streamed_chat_is_openais() -> None:
    """The first chunk says who speaks, the last one why it ended."""
    chunks = [ChatCompletionChunk.model_validate(b) for b in streamed(ChatEvents("r", "m", 5))]
    deltas = [c.choices[0].delta for c in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [d.content for d in deltas[1:]] == [*TEXTS, None]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 6 + ["length"]
    assert chunks[-1].usage


@pytest.mark.parametrize("kind", [ChatEvents, CompletionEvents])
def test_usage_is_null_until_its_own_chunk(kind: type[ChatEvents] | type[CompletionEvents]) -> None:
    """Only for clients that asked for it; the others never see the field."""
    asked = streamed(kind("r", "m", 5, include_usage=True))
    assert [body["usage"] for body in asked] == [None] * (len(asked) - 1) + [USED]
    assert not any("usage" in body for body in streamed(kind("r", "m", 5))[:-1])


def test_streamed_log_probabilities_know_their_place() -> None:
    """`text_offset` counts through the whole stream."""
    events = CompletionEvents("r", "m", 5)
    first, _, second = bodies(
        events.text("aü", LOGPROBS) + events.text("bcd") + events.text("aü", LOGPROBS)
    )
    assert first["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    assert second["choices"][0]["logprobs"]["text_offset"] == [5, 6]
    (chat,) = bodies(ChatEvents("r", "m", 5).text("aü", LOGPROBS))
    chunk = ChatCompletionChunk.model_validate(chat).choices[0]
    assert chunk.logprobs
    assert [token.token for token in chunk.logprobs.content or []] == ["a", "ü"]


CALL = '<tool_call>{"name": "look", "arguments": {"at": "ü"}}</tool_call>'


def test_a_chat_that_calls_is_openais() -> None:
    """Without text its content is null."""
    calls = [ToolCall("look", '{"at": "ü"}', "123456789")]
    choice = openai_bodies.chat_choice(1, "", "stop", calls=calls)
    made = ChatCompletion.model_validate(
        openai_bodies.chat_completion("r", "m", 5, [choice], USED), strict=True
    ).choices[0]
    assert (made.index, made.finish_reason, made.message.content) == (1, "tool_calls", None)
    (call,) = made.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.id, call.function.arguments) == ("123456789", '{"at": "ü"}')


def tool_events() -> ToolCallEvents:
    return ToolCallEvents(ToolParser(HERMES, "0123456789"), "r", "m", 5)


def test_a_streamed_call_is_openais() -> None:
    """Its function first, then the arguments, each call under its own index."""
    events = tool_events()
    stream = events.text("Well. <tool") + events.text(CALL.removeprefix("<tool") + CALL)
    chunks = [ChatCompletionChunk.model_validate(b) for b in bodies(stream + events.finish("stop"))]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.content for delta in deltas] == ["Well.", *[None] * 5]
    called = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id) for call in called] == [
        *((0, "012345600"), (0, None), (1, "012345601"), (1, None))
    ]
    functions = [call.function for call in called if call.function]
    assert [(f.name, f.arguments) for f in functions[:2]] == [("look", ""), (None, '{"at": "ü"}')]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_an_answer_that_was_cut_short_says_so() -> None:
    """A client that waits for more calls must not take the first for all."""
    events = tool_events()
    (*_, last) = bodies(events.text(CALL) + events.finish("length"))
    assert last["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_of_a_call_come_with_its_tokens() -> None:
    """Also while their text is held back."""
    events = tool_events()
    held, *_ = bodies(events.text("<tool_call>", LOGPROBS))
    choice = ChatCompletionChunk.model_validate(held).choices[0]
    assert choice.logprobs
    assert [token.token for token in choice.logprobs.content or []] == ["a", "ü"]
    assert choice.delta.content == ""


def test_usage_counts_each_prompt_once() -> None:
    """As OpenAI bills it."""
    usages = [messages.openai_usage(prompt, 2) for prompt in (3, 3, 5, 5)]
    assert openai_bodies.total_usage(usages, 2) == messages.openai_usage(8, 8)
    assert openai_bodies.total_usage([USED], 1) is USED


def test_a_failed_stream_ends_in_an_error_event() -> None:
    """The status line is long gone; the SDK raises on this event."""
    (body,) = bodies(ChatEvents("r", "m", 0).failure(BrokerUnavailable("gone")))
    assert body["error"]["code"] == "broker_unavailable"


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_are_openais(encoding: Any) -> None:
    """Both encodings, and every float as the engine had it."""
    rows = [[0.1, -2.0, 3.5], [0.0, 1e-30, 1e30]]
    vectors = [struct.pack("<3f", *row) for row in rows]
    body = orjson.loads(b"".join(openai_bodies.embeddings("m", vectors, 9, encoding)))
    if encoding == "base64":
        for item in body["data"]:
            item["embedding"] = struct.unpack("<3f", base64.b64decode(item["embedding"]))
    made = CreateEmbeddingResponse.model_validate(body)
    assert [struct.pack("<3f", *item.embedding) for item in made.data] == vectors
    assert [item.index for item in made.data] == [0, 1]
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (9, 9)


def test_the_best_documents_come_first() -> None:
    """Equal ones in the order that they were given in; zero means no limit."""
    rows = [struct.pack("<f", score) for score in (0.25, 0.5, 0.25, 1)]
    found = list(openai_bodies.rank_documents(rows, ["a", "b", "c", "d"], 0))
    assert [result["index"] for result in found] == [3, 1, 0, 2]
    assert found[0] == {"index": 3, "relevance_score": 1.0, "document": {"text": "d"}}
    assert list(openai_bodies.rank_documents(rows, None, 2)) == [
        {"index": 3, "relevance_score": 1.0},
        {"index": 1, "relevance_score": 0.5},
    ]


def test_models_are_openais() -> None:
    """An alias is listed under its own name."""
    card = openai_bodies.model_card(mock_model("m"), 2, "chat")
    assert Model.model_validate(card, strict=True).id == "chat"
    assert openai_bodies.model_list([card]) == {"object": "list", "data": [card]}


@pytest.mark.parametrize(
    ("failure", "kind", "param"),
    [
        (BadRequest("x", "messages[0]"), "invalid_request_error", "messages[0]"),
        (UnknownField("x", "zz"), "invalid_request_error", "zz"),
        (Unauthenticated("x"), "authentication_error", None),
        (ModelNotFound("x"), "not_found_error", "model"),
        (LaneFull("x"), "rate_limit_error", None),
        (BrokerUnavailable("x"), "server_error", None),
        (MillstreamError("x"), "server_error", None),
    ],
)
def test_an_error_body_has_openais_shape(
    failure: MillstreamError, kind: str, param: str | None
) -> None:
    """Clients branch on `code` and show `message`."""
    assert error_bodies.error_body(failure) == {
        "error": {"message": failure.message, "type": kind, "param": param, "code": failure.code}
    }

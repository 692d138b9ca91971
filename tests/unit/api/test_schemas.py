"""Bodies: strict, nothing unknown, and each refusal one sentence with the field's path."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from api.schemas.batches import CreateBatch
from api.schemas.completions import ChatRequest, CompletionRequest
from api.schemas.embeddings import EmbeddingRequest
from api.schemas.fields import Body
from api.schemas.parsing import decode, parse
from api.schemas.websocket_frames import Frame, GenerateFrame
from api.submission.submission_record import Submission
from gateway.entrypoints import openapi
from streams.errors import BadRequest
from streams.messages import ResolvedSampling, Sampling, SamplingDefaults
from streams.subjects import Priority

COMPLETION = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
EMBEDDING = {"model": "m", "input": "x"}


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, {**COMPLETION, **fields})


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, {**CHAT, **fields})


def refusal(record: type[Body], body: dict[str, Any]) -> tuple[str, str | None, str]:
    with pytest.raises(BadRequest) as refused:
        parse(record, body)
    return refused.value.code, refused.value.field, str(refused.value)


def test_a_check_of_several_fields_is_told_in_its_own_words() -> None:
    """No field is at fault alone."""
    batch = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
    hours = {"run_between": ["22:00", "06:00"], "time_zone": "Mars"}
    told = "'Mars' is no time zone such as Europe/Berlin"
    assert refusal(CreateBatch, batch | hours) == ("invalid_request", None, told)
    assert refusal(CreateBatch, batch | {"time_zone": "Mars"}) == ("invalid_request", None, told)


def test_what_was_not_said_is_as_openai_has_it() -> None:
    """Clients that say nothing expect OpenAI's defaults, unless the model has its own."""
    assert completion().to_sampling() == Sampling(max_tokens=0)
    assert completion().to_sampling().resolve() == ResolvedSampling(
        max_tokens=0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
    )


def test_what_was_said_is_not_replaced_by_the_models_defaults() -> None:
    """Also where it is said that something is off."""
    own = SamplingDefaults(0.6, 0.9, 20, 0.1, 1.3)
    said = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert completion(**said).to_sampling().resolve(own) == ResolvedSampling(max_tokens=0)
    resolved = completion(top_p=0).to_sampling().resolve(own)
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.0, 1.0, 20)
    assert vars(completion().to_sampling().resolve(own)).items() >= vars(own).items()
    assert completion(**dict.fromkeys(["temperature", "top_p", "stop", "n"])) == completion()


def test_what_was_said_reaches_the_engine() -> None:
    """Every knob of the contract, in one request."""
    knobs = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": -1, "max_tokens": 9}
    said = completion(**knobs, stop="a", logprobs=0, ignore_eos=True)
    assert said.to_sampling() == Sampling(9, 0.0, 0.5, 3, -1, ["a"], 0, ignore_eos=True)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"max_tokens": "many"}, "max_tokens", "must be a valid integer, it is 'many'"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, it is 0"),
        ({"max_tokens": True}, "max_tokens", "must be a valid integer"),
        ({"max_tokens": 1.0}, "max_tokens", "must be a valid integer"),
        ({"max_tokens": 2**31}, "max_tokens", "must be less than"),
        ({"temperature": 2.1}, "temperature", "must be less than or equal to 2, it is 2.1"),
        ({"temperature": -0.1}, "temperature", "must be greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"temperature": "1"}, "temperature", "must be a valid number"),
        ({"top_p": -0.1}, "top_p", "must be greater than or equal to 0"),
        ({"seed": 2**63}, "seed", "must be less than"),
        ({"min_p": 1.1}, "min_p", "must be less than or equal to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be greater than or equal to 0.01"),
        ({"presence_penalty": 2.1}, "presence_penalty", "must be less than or equal to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "must be greater than or equal to -2"),
        ({"frequency_penalty": False}, "frequency_penalty", "must be a valid number"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids for names, not 'a'"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids for names"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100, not 101"),
        ({"logit_bias": {"1": True}}, "logit_bias", "from -100 to 100, not True"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias", "not nan"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "the limit is 1024"),
        ({"logprobs": 21}, "logprobs", "must be less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "must be a valid integer"),
        ({"stop": ["a"] * 17}, "stop", "has 17 strings, the limit is 16"),
        ({"stop": [""]}, "stop", "1 to 256 characters"),
        ({"stop": [1]}, "stop", "must be a string or a list of strings"),
        ({"stop": 0}, "stop", "must be a string or a list of strings"),
        ({"stream": 1}, "stream", "must be a valid boolean"),
        ({"priority": "high"}, "priority", "'interactive', 'standard' or 'batch'"),
        ({"service_tier": "gold"}, "service_tier", "'flex'"),
        ({"deadline_ms": 0}, "deadline_ms", "greater than or equal to 1"),
        ({"model": 7}, "model", "must be a valid string, it is 7"),
        ({"model": ""}, "model", "must have at least 1 character"),
        ({"model": "m" * 257}, "model", "must have at most 256 characters"),
        ({"prompt": ""}, "prompt", "not empty"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": None}, "prompt", "not empty"),
        ({"prompt": [True]}, "prompt", "list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "list of token ids"),
        ({"prompt": {"a": 1}}, "prompt", "list of token ids"),
        ({"stream_options": {}}, "stream_options", "only for stream"),
        ({"stream": True, "stream_options": 1}, "stream_options", "must be an object, it is 1"),
    ],
)
def test_a_wrong_value_is_told_with_its_field(
    fields: dict[str, Any], field: str, words: str
) -> None:
    """The client must see what to change; a guess of ours would hide its mistake."""
    code, found, message = refusal(CompletionRequest, COMPLETION | fields)
    assert (code, found) == ("invalid_request", field)
    assert message.startswith(field)
    assert words in message


@pytest.mark.parametrize(
    ("record", "body", "field"),
    [
        (CompletionRequest, COMPLETION | {"max_tokns": 5}, "max_tokns"),
        (CompletionRequest, COMPLETION | {"tools": []}, "tools"),
        (
            CompletionRequest,
            COMPLETION | {"stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
        ),
        (ChatRequest, CHAT | {"prompt": "x"}, "prompt"),
        (
            ChatRequest,
            {"model": "m", "messages": [{"role": "user", "content": "x", "colour": 1}]},
            "messages[0].colour",
        ),
        (EmbeddingRequest, EMBEDDING | {"temperature": 1}, "temperature"),
    ],
)
def test_an_unknown_field_is_named(record: type[Body], body: dict[str, Any], field: str) -> None:
    """A typing error must not silently change what is generated."""
    assert refusal(record, body) == ("unknown_field", field, f"unknown field {field}")


def test_a_missing_field_is_named() -> None:
    """Also deep inside a chat."""
    assert refusal(CompletionRequest, {"model": "m"})[1:] == ("prompt", "prompt is missing")
    assert refusal(ChatRequest, {"model": "m", "messages": [{}]})[1] == "messages[0].role"


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("best_of", [None, 1], [3]),
        ("echo", [None, False], [True, 0]),
        ("suffix", [None, ""], ["end"]),
    ],
)
def test_what_is_not_supported_yet_is_refused_unless_it_asks_for_nothing(
    name: str, neutral: list[Any], asking: list[Any]
) -> None:
    """SDKs send defaults along; ignoring a real wish would give wrong answers."""
    for value in neutral:
        assert completion(**{name: value})
    for value in asking:
        assert refusal(CompletionRequest, COMPLETION | {name: value})[:2] == (
            "unsupported_value",
            name,
        )


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("tool_choice", [None, "auto", "none"], [{"type": "custom"}]),
        ("functions", [None, []], [[{"name": "f"}]]),
        ("modalities", [None, ["text"]], [["audio"]]),
        ("audio", [None], [{"voice": "alloy"}]),
    ],
)
def test_the_same_holds_for_chats(name: str, neutral: list[Any], asking: list[Any]) -> None:
    """Fields that only chats have."""
    for value in neutral:
        assert chat(**{name: value})
    for value in asking:
        assert refusal(ChatRequest, CHAT | {name: value})[:2] == ("unsupported_value", name)


def test_what_asks_for_nothing_we_could_do_is_ignored() -> None:
    """A client loses nothing by it."""
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True}
    assert chat(**ignored).template_messages == chat().template_messages


@pytest.mark.parametrize(
    ("fields", "lane"),
    [
        ({}, Priority.STANDARD),
        ({"service_tier": "auto"}, Priority.STANDARD),
        ({"service_tier": "default"}, Priority.STANDARD),
        ({"service_tier": "priority"}, Priority.INTERACTIVE),
        ({"service_tier": "flex"}, Priority.BATCH),
        ({"service_tier": "flex", "priority": "interactive"}, Priority.INTERACTIVE),
    ],
)
def test_a_service_tier_is_a_priority(fields: dict[str, Any], lane: Priority) -> None:
    """OpenAI's word for ours; ours wins."""
    assert completion(**fields).lane_priority == lane


@pytest.mark.parametrize(
    ("given", "taken"), [("x", "x"), (["x"], "x"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])]
)
def test_one_prompt_may_come_in_four_shapes(given: object, taken: object) -> None:
    """OpenAI's SDK and its imitators use all of them."""
    assert completion(prompt=given).prompt == taken


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]], ["a", [1]]])
def test_a_body_may_have_many_prompts_and_a_frame_has_one(prompts: list[Any]) -> None:
    """A frame's answer is one stream of tokens."""
    assert completion(prompt=prompts).prompts == prompts
    frame = {"type": "generate", "id": "1", "model": "m", "prompt": prompts}
    code, field, message = refusal(GenerateFrame, frame)
    assert (code, field) == ("unsupported_value", "prompt")
    assert "2 prompts" in message


def test_each_answer_is_a_submission_with_a_seed_of_its_own() -> None:
    """As vLLM counts: from the seed on, for each prompt alike."""
    body = completion(prompt=["a", "b"], n=2, seed=7)
    found = [each for one in Submission.all_from_body(body, 16) for each in one.split_choices()]
    assert [(each.prompt, each.sampling.seed) for each in found] == [
        *(("a", 7), ("a", 8), ("b", 7), ("b", 8))
    ]
    unseeded = Submission.all_from_body(completion(n=2), 16)[0].split_choices()
    assert [each.sampling.seed for each in unseeded] == [None, None]


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"n": 0}, "invalid_request", "n"),
        ({"n": 9}, "invalid_request", "n"),
        ({"n": True}, "invalid_request", "n"),
        ({"prompt": ["a"] * 129}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "invalid_request", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_request", "prompt"),
        ({"n": 2, "best_of": 3}, "unsupported_value", "best_of"),
        ({"prompts": ["a"]}, "unknown_field", "prompts"),
    ],
)
def test_answers_have_a_limit(fields: dict[str, Any], code: str, field: str) -> None:
    """Each is a request of its own: one body must not fill a lane."""
    assert refusal(CompletionRequest, COMPLETION | fields)[:2] == (code, field)


@pytest.mark.parametrize("best_of", [None, 1, 2])
def test_best_of_may_say_what_n_says(best_of: int | None) -> None:
    """Older clients send both."""
    assert completion(n=2, best_of=best_of).choice_count == 2


def test_chat_parts_are_kept_for_the_template() -> None:
    """Newer clients send texts as lists of parts, and some templates join these themselves."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None}]
    assert chat(messages=turns).template_messages == [
        {"role": "system", "content": parts},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        ({"role": "user", "content": 7}, "invalid_request", "messages[1].content"),
        ({"role": "tool", "content": "x"}, "invalid_request", "messages[1]"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "invalid_request", "messages[1]"),
        ({"role": "user"}, "invalid_request", "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "invalid_request", "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "invalid_request", "messages[1].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            "unsupported_value",
            "messages[1].content",
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            "invalid_request",
            "messages[1].tool_calls[0].type",
        ),
        ("x", "invalid_request", "messages[1]"),
    ],
)
def test_a_wrong_message_is_told_with_its_place(message: object, code: str, field: str) -> None:
    """A chat may have hundreds of them."""
    body = {"model": "m", "messages": [*CHAT["messages"], message]}
    assert refusal(ChatRequest, body)[:2] == (code, field)


def test_an_answer_may_be_sent_back_as_it_is() -> None:
    """SDK users append `response.choices[0].message` to their messages."""
    nothing = dict.fromkeys(["refusal", "audio", "function_call", "tool_calls", "annotations"])
    answer = {"role": "assistant", "content": "x", **nothing}
    assert chat(messages=[answer]).template_messages == [{"role": "assistant", "content": "x"}]


def test_chat_log_probabilities_need_their_switch() -> None:
    """OpenAI has two fields for it in chats."""
    assert chat(logprobs=True).to_sampling().logprobs == 0
    assert chat(logprobs=True, top_logprobs=2).to_sampling().logprobs == 2
    assert chat(logprobs=False).to_sampling().logprobs is None
    assert refusal(ChatRequest, CHAT | {"top_logprobs": 2})[1] == "top_logprobs"


def test_both_names_of_the_output_limit_count() -> None:
    """`max_completion_tokens` replaced `max_tokens`; two different limits are a mistake."""
    assert chat(max_tokens=3).to_sampling().max_tokens == 3
    assert chat(max_completion_tokens=4, max_tokens=4).to_sampling().max_tokens == 4
    assert refusal(ChatRequest, CHAT | {"max_tokens": 1, "max_completion_tokens": 2})[1]


@pytest.mark.parametrize(
    ("given", "taken"),
    [("x", ["x"]), (["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_inputs_are_always_a_list_in_the_end(given: object, taken: object) -> None:
    """The four shapes of OpenAI's `input`."""
    assert parse(EmbeddingRequest, EMBEDDING | {"input": given}).input == taken


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": 7}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
    ],
)
def test_a_wrong_embedding_body_is_refused(fields: dict[str, Any], field: str) -> None:
    """Each would fail later, for everybody in the same batch."""
    assert refusal(EmbeddingRequest, EMBEDDING | fields)[:2] == ("invalid_request", field)


@pytest.mark.parametrize(
    "data", [b"{", b"", b"[]", b"1", b'"x"', b"null", b'{"a": NaN}', b'"\\ud800"', b"\xff"]
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    """Whatever comes over the wire ends in a sentence."""
    with pytest.raises(BadRequest, match="this"):
        decode(data)


def test_a_deeply_nested_body_is_refused() -> None:
    """Recursion is a stranger's tool."""
    with pytest.raises(BadRequest):
        decode(b"[" * 100_000)
    with pytest.raises(BadRequest):
        decode(b"\x91" * 100_000, "msgpack")


@pytest.mark.parametrize("record", [CompletionRequest, ChatRequest, EmbeddingRequest, Frame])
def test_every_record_has_a_schema(record: Any) -> None:
    """/openapi.json shows what may be sent."""
    schema = TypeAdapter(record).json_schema()
    assert "model" in str(schema)


def test_the_openapi_document_describes_choices_and_tools() -> None:
    """By the names that travel, with their limits."""
    schemas = openapi.build_document()["components"]["schemas"]
    completion, chat = (
        schemas[name]["properties"] for name in ("CompletionRequest", "ChatRequest")
    )
    assert "prompts" not in completion
    assert completion["prompt"]["anyOf"][2]["maxItems"] == 128
    assert {"minimum": 1, "maximum": 8, "type": "integer"} in completion["n"]["anyOf"]
    assert {"tools", "tool_choice", "parallel_tool_calls", "n"} <= chat.keys()
    assert schemas["Function"]["properties"]["parameters"]["description"] == "a JSON schema"
    assert {"tool_calls", "tool_call_id"} <= schemas["ChatMessage"]["properties"].keys()


@pytest.mark.parametrize("fields", [{"temperature": 1e-20}, {"temperature": 5e-324}, {"top_p": 0}])
def test_what_leaves_only_the_likeliest_token_is_greedy(fields: dict[str, float]) -> None:
    """A division by such a temperature overflows: every token would be as good as any other."""
    assert completion(**fields).to_sampling().temperature == 0


def test_top_k_may_be_off_in_vllms_word() -> None:
    assert completion(top_k=-1).to_sampling().top_k == 0


def test_older_names_of_structured_outputs_mean_the_same() -> None:
    named = completion(guided_choice=["a", "b"]).grammar
    assert named == completion(structured_outputs={"choice": ["a", "b"]}).grammar is not None
    assert completion(guided_json=None).grammar is None

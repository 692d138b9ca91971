"""Tools through the whole pipeline: told to the model, and its calls told to the client."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.support.fixed_text_engine import fixed_text_gateway
from tests.support.gateways import KEY, HttpResponse, RunningGateway, cell, text_of

HERMES = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}"""
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ASKED: dict[str, Any] = {
    "model": "mock",
    "messages": [{"role": "user", "content": "how is it?"}],
    "tools": [TOOL],
}


async def chat(gateway: RunningGateway, **body: Any) -> HttpResponse:
    return await gateway.request("POST", "/v1/chat/completions", {**ASKED, **body})


def sdk(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)


async def test_the_openai_sdk_gets_calls(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text before them is text; streamed they are the same, ids included."""
    text = f"I look.\n{CALL}\n{CALL}"
    async with (
        fixed_text_gateway(nats_url, monkeypatch, text, HERMES) as gateway,
        sdk(gateway) as client,
    ):
        answer = await client.chat.completions.create(**ASKED, n=2)
        assert len({call.id for c in answer.choices for call in c.message.tool_calls or ()}) == 4
        for choice in answer.choices:
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
            for call in choice.message.tool_calls or ():
                assert isinstance(call, ChatCompletionMessageFunctionToolCall)
                assert call.function.name == "weather"
                assert json.loads(call.function.arguments) == {"city": "Zürich"}
        async with client.chat.completions.stream(**ASKED) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert (final.finish_reason, final.message.content) == ("tool_calls", "I look.")
        calls = final.message.tool_calls or []
        assert [call.function.arguments for call in calls] == ['{"city": "Zürich"}'] * 2


async def test_a_call_and_its_result_go_back_into_the_chat(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the SDK returned is sent back as it is, as every agent does."""
    async with (
        fixed_text_gateway(nats_url, monkeypatch, CALL, HERMES) as gateway,
        sdk(gateway) as client,
    ):
        said = (await client.chat.completions.create(**ASKED)).choices[0].message
        assert said.content is None
        (call,) = said.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        turns = [*ASKED["messages"], said, result]
        again = await client.chat.completions.create(**{**ASKED, "messages": turns})
        assert again.choices[0].finish_reason == "tool_calls"
        assert again.usage is not None
        # the prompt has grown by the call's arguments and the result, and by nothing else
        dumped = said.model_dump(exclude_none=True)
        sparse = await chat(gateway, messages=[*ASKED["messages"], dumped, result])
        assert sparse.json["usage"]["prompt_tokens"] == again.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_call_comes_as_text(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Also its log probabilities, and the reason why the text ended."""
    text = "<tool_call>{'name': weather}</tool_call> maybe "
    async with fixed_text_gateway(nats_url, monkeypatch, text, HERMES) as gateway:
        answer = await chat(gateway, stream=stream)
        choices = [choice for event in said(answer, stream) for choice in event["choices"]]
        parts = [choice.get("delta", choice.get("message")) for choice in choices]
        assert "".join(part.get("content") or "" for part in parts) == text
        assert choices[-1]["finish_reason"] == "stop"
        assert not any("tool_calls" in part for part in parts)


def said(answer: HttpResponse, stream: bool) -> list[Any]:
    return answer.events if stream else [answer.json]


async def test_a_forced_call_is_read_from_bare_json(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the grammar has the engine write it."""
    async with fixed_text_gateway(nats_url, monkeypatch, '{"city": "Rome"}', HERMES) as gateway:
        named = {"type": "function", "function": {"name": "weather"}}
        message = (await chat(gateway, tool_choice=named)).json["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


async def test_without_tools_the_text_is_left_alone(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for calls: none offered, or none wanted."""
    async with fixed_text_gateway(nats_url, monkeypatch, CALL, HERMES) as gateway:
        for fields in ({"tools": None}, {"tool_choice": "none"}):
            choice = (await chat(gateway, **fields)).json["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_over_the_socket_calls_come_as_the_model_wrote_them(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames carry tokens and their text; what that means is the client's."""
    async with (
        fixed_text_gateway(nats_url, monkeypatch, CALL, HERMES) as gateway,
        gateway.socket() as socket,
    ):
        await socket.send(type="generate", id="a", **ASKED)
        assert text_of(await socket.receive_rest("a")) == CALL


async def test_a_model_that_knows_no_tools_is_told_by_name(nats_url: str) -> None:
    """A prompt without them would be answered without them, and nobody would see why."""
    async with cell(nats_url) as (gateway,):
        answer = await chat(gateway)
        assert (answer.status, answer.error["code"]) == (400, "unsupported_value")
        assert answer.error["param"] == "tools"
        assert "'mock'" in answer.error["message"]
        assert (await chat(gateway, tool_choice="none")).status == 200

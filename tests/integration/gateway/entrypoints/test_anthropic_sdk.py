"""Anthropic's SDK against a gateway: messages whole and streamed, tools, errors, token counts."""

from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, RawMessageStreamEvent, TextBlock, ToolUseBlock

from api.messages.message_answer import PING
from gateway.entrypoints import completions
from tests.support.fixed_text_engine import fixed_text_gateway
from tests.support.gateways import KEY, HttpResponse, RunningGateway, cell, tenants

HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
HERMES = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object"}}


def sdk(gateway: RunningGateway, key: str = KEY, retries: int = 0) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=retries)


def text_of(content: Sequence[object]) -> str:
    return "".join(block.text for block in content if isinstance(block, TextBlock))


async def collect_events(
    client: anthropic.AsyncAnthropic, **body: Any
) -> list[RawMessageStreamEvent]:
    stream = await client.messages.create(
        model="mock", max_tokens=9, messages=HI, stream=True, **body
    )
    return [event async for event in stream]


async def post(gateway: RunningGateway, path: str = "", **body: Any) -> HttpResponse:
    whole = {"model": "mock", "max_tokens": 9, "messages": HI, **body}
    return await gateway.request("POST", f"/v1/messages{path}", whole)


async def test_a_message_is_the_same_whole_and_streamed(nats_url: str) -> None:
    """The SDK's own accumulator makes a message of the events."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        asked: Any = {"model": "mock", "max_tokens": 9, "messages": HI, "system": "be brief"}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            text = "".join([part async for part in stream.text_stream])
            streamed = await stream.get_final_message()
    assert text_of(whole.content) == text_of(streamed.content) == text != ""
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    assert (streamed.stop_reason, streamed.stop_sequence) == ("max_tokens", None)
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 9
    assert whole._request_id
    assert whole.id == f"msg_{whole._request_id}"


async def test_the_events_of_a_message_come_in_anthropics_order(nats_url: str) -> None:
    """The prompt's tokens are known at its start, all others at its end."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        events = await collect_events(client)
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 0
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = events[0], events[-2]
    assert start.type == "message_start"
    assert end.type == "message_delta"
    cached = end.usage.cache_read_input_tokens or 0
    assert start.message.usage.input_tokens == (end.usage.input_tokens or 0) + cached > 0


async def test_the_stop_sequence_that_came_is_named(nats_url: str) -> None:
    """`stop_sequence` is the one of several that ended the text."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        asked: Any = {"model": "mock", "max_tokens": 20, "messages": HI}
        word = text_of((await client.messages.create(**asked)).content).split()[3]
        stops = ["nowhere to be seen", word]
        whole = await client.messages.create(**asked, stop_sequences=stops)
        async with client.messages.stream(**asked, stop_sequences=stops) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
        assert word not in text_of(message.content)


async def test_cached_tokens_are_counted_apart(nats_url: str) -> None:
    """`input_tokens` are those that had to be computed."""
    long: list[MessageParam] = [{"role": "user", "content": "x" * 600}]
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        asked: Any = {"model": "mock", "max_tokens": 1, "messages": long}
        first = (await client.messages.create(**asked)).usage
        again = (await client.messages.create(**asked)).usage
    assert first.cache_read_input_tokens == 0
    assert again.cache_read_input_tokens
    assert again.input_tokens + again.cache_read_input_tokens == first.input_tokens


async def test_tools_are_called_and_told_their_results(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that the SDK returned go back as they are, with the results behind them."""
    text = f"I look.\n{CALL}\n{CALL}"
    async with (
        fixed_text_gateway(nats_url, monkeypatch, text, HERMES) as gateway,
        sdk(gateway) as client,
    ):
        asked: Any = {"model": "mock", "max_tokens": 99, "messages": HI, "tools": [WEATHER]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
            assert (message.stop_reason, text_of(message.content)) == ("tool_use", "I look.")
            calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
            assert [call.input for call in calls] == [{"city": "Zürich"}] * 2
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
        ]
        turns = [*HI, {"role": "assistant", "content": streamed.content}]
        before = await client.messages.count_tokens(model="mock", messages=HI, tools=[WEATHER])
        told: Any = {**asked, "messages": [*turns, {"role": "user", "content": results}]}
        again = await client.messages.create(**told)
        del told["max_tokens"]
        counted = await client.messages.count_tokens(**told)
    assert again.usage.input_tokens == counted.input_tokens > before.input_tokens
    assert again.stop_reason == "tool_use"


async def test_a_forced_tool_is_asked_for_by_a_grammar(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole text is then the arguments of the call."""
    async with (
        fixed_text_gateway(nats_url, monkeypatch, '{"city": "Bern"}', HERMES) as gateway,
        sdk(gateway) as client,
    ):
        message = await client.messages.create(
            model="mock",
            max_tokens=99,
            messages=HI,
            tools=[WEATHER],
            tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        )
    (call,) = message.content
    assert isinstance(call, ToolUseBlock)
    assert call.input == {"city": "Bern"}


async def test_counted_tokens_are_those_of_the_message(nats_url: str) -> None:
    """And nothing is generated."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        asked: Any = {"model": "mock", "messages": HI, "system": "be brief"}
        counted = await client.messages.count_tokens(**asked)
        message = await client.messages.create(**asked, max_tokens=1)
        assert counted.input_tokens == message.usage.input_tokens
        refused = await post(gateway, "/count_tokens", model="vectors")
        assert "max_tokens" in refused.json["error"]["message"], "it is no field of this body"


async def test_the_anthropic_sdk_knows_our_errors(nats_url: str) -> None:
    """Its exceptions are by status, its `type` by ours; the id is that of `millstream why`."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        asked: Any = {"model": "mock", "max_tokens": 9, "messages": HI}
        with pytest.raises(anthropic.NotFoundError) as absent:
            await client.messages.create(**{**asked, "model": "absent"})
        assert absent.value.type == "not_found_error"
        assert absent.value.request_id
        body: Any = absent.value.body
        assert body["request_id"] == absent.value.request_id
        with pytest.raises(anthropic.BadRequestError) as long:
            await client.messages.create(**{**asked, "max_tokens": 20_000})
        assert long.value.type == "invalid_request_error"
        async with sdk(gateway, "sk-nope") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await stranger.messages.create(**asked)
        assert unknown.value.type == "authentication_error"
        async with anthropic.AsyncAnthropic(base_url=gateway.url, auth_token=KEY) as bearer:
            assert (await bearer.messages.create(**asked)).content


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/messages", 405),
        ("DELETE", "/v1/messages/count_tokens/", 405),
        ("GET", "/v1/messages/batches", 404),
        ("POST", "/v1/messages/batches", 404),
    ],
)
async def test_where_nothing_is_the_error_has_anthropics_shape(
    nats_url: str, method: str, path: str, status: int
) -> None:
    """The SDK reads no other; what lies beside these paths keeps OpenAI's."""
    async with cell(nats_url) as (gateway,):
        found = await gateway.request(method, path)
        beside = await gateway.request(method, path.replace("messages", "messages_"))
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert (found.status, found.json["type"], found.json["error"]["type"]) == (
        status,
        "error",
        kind,
    )
    assert found.json["request_id"] == found.headers["request-id"]
    assert (beside.status, beside.json["error"]["code"]) == (404, "not_found")


async def test_the_sdk_does_not_repeat_what_would_fail_again(nats_url: str) -> None:
    """A deadline that has passed is a 504, which it would else send twice more."""
    async with cell(nats_url, mock={"ttft_ms": 60_000}) as (gateway,):
        late = await post(gateway, deadline_ms=200)
        assert late.status == 504
        assert late.json["error"]["type"] == "timeout_error"
        assert late.headers["x-should-retry"] == "false"
        assert late.headers["request-id"] == late.json["request_id"]


async def test_a_tenant_over_its_quota_is_told_when_to_come_back(nats_url: str) -> None:
    """The SDK waits so long before it tries again."""
    async with (
        cell(nats_url, tenants=tenants(requests_per_minute=1)) as (gateway,),
        sdk(gateway) as client,
    ):
        asked: Any = {"model": "mock", "max_tokens": 1, "messages": HI}
        await client.messages.create(**asked)
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(**asked)
    assert refused.value.type == "rate_limit_error"
    assert int(refused.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [*HI, {"role": "assistant", "content": "The"}]}, "cannot be begun"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}]}, "web_search_20250305"),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    nats_url: str, change: dict[str, Any], reason: str
) -> None:
    """A wish that is left out in silence would be a wrong answer."""
    async with cell(nats_url) as (gateway,):
        answer = await post(gateway, **change)
    assert (answer.status, answer.json["type"]) == (400, "error")
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert reason in answer.json["error"]["message"]


async def test_a_silent_stream_is_pinged(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an event of its own, which the SDK skips."""
    monkeypatch.setattr(completions, "PING_INTERVAL_SECONDS", 0.05)
    async with cell(nats_url, mock={"itl_ms": 400}) as (gateway,):
        streamed = await post(gateway, stream=True, max_tokens=3)
    assert streamed.body.count(PING) >= 2
    assert streamed.events[-1] == {"type": "message_stop"}


async def test_a_stream_goes_on_behind_any_event(nats_url: str) -> None:
    """Both parts of a stream that was cut anywhere are the stream that was not."""
    async with cell(nats_url) as (gateway,):
        body = {"model": "mock", "max_tokens": 5, "messages": HI, "stream": True}
        key = {"Idempotency-Key": "k"}
        whole = await gateway.request("POST", "/v1/messages", body, headers=key)
        events = whole.body.split(b"\n\n")[:-1]
        assert len(events) >= 6  # a slow machine joins the tokens of several steps
        for count, event in enumerate(events[:-1], 1):
            last = event.split(b"\n")[0].removeprefix(b"id: ").decode()
            rest = await gateway.request(
                "POST", "/v1/messages", body, headers={**key, "Last-Event-ID": last}
            )
            assert rest.body.split(b"\n\n")[:-1] == events[count:]

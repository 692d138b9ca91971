"""`/v1/responses` with the OpenAI SDK: whole, streamed, stored, continued."""

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.integration.gateway.entrypoints.test_tool_calls import HERMES
from tests.support.fixed_text_engine import fixed_text_gateway
from tests.support.gateways import KEY, OTHER_KEY, RunningGateway, cell

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
]


class Place(BaseModel):
    """A place, as the SDK parses it."""

    city: str


def sdk(gateway: RunningGateway, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


async def test_a_response_is_answered_whole_and_streamed(nats_url: str) -> None:
    """The SDK's accumulator makes of the events what the whole answer is."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        whole = await client.responses.create(
            model="mock", input="hi", temperature=0, max_output_tokens=500, metadata={"a": "b"}
        )
        assert whole.status in ("completed", "incomplete")
        assert whole.output_text
        assert whole.metadata == {"a": "b"}
        async with client.responses.stream(
            model="mock", input="hi", temperature=0, max_output_tokens=500
        ) as stream:
            events = [event async for event in stream]
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted(set(numbers))
        assert events[0].type == "response.created"
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == whole.output_text
        assert last.response.usage == whole.usage


async def test_a_stored_response_is_read_continued_and_deleted(nats_url: str) -> None:
    """By its tenant alone; what was not stored is not found."""
    async with cell(nats_url, 2) as (gateway, second), sdk(gateway) as client:
        first = await client.responses.create(model="mock", input="hi", max_output_tokens=8)
        async with sdk(second) as other_gateway, sdk(second, OTHER_KEY) as stranger:
            assert await other_gateway.responses.retrieve(first.id) == first
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.create(
                    model="mock", input="and?", previous_response_id=first.id
                )
            items = [
                item async for item in await other_gateway.responses.input_items.list(first.id)
            ]
            assert [item.type for item in items] == ["message"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        unstored = await client.responses.create(
            model="mock", input="hi", max_output_tokens=8, store=False
        )
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored.id)


async def test_a_call_comes_as_an_item_and_goes_back_by_its_id(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed as whole; its result continues the stored conversation."""
    async with (
        fixed_text_gateway(nats_url, monkeypatch, f"I look.\n{CALL}", HERMES) as gateway,
        sdk(gateway) as client,
    ):
        async with client.responses.stream(model="mock", input="hi", tools=TOOLS) as stream:
            streamed = await stream.get_final_response()
        shown = await client.responses.retrieve(streamed.id)
        assert [item.type for item in shown.output] == ["message", "function_call"]
        call = shown.output[1]
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("weather", '{"city": "Ulm"}')
        assert streamed.output[1].to_dict() == {**call.to_dict(), "parsed_arguments": None}
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
        continued = await client.responses.create(
            model="mock", input=result, tools=TOOLS, previous_response_id=shown.id
        )
        assert continued.previous_response_id == shown.id
        asked: Any = [{"role": "user", "content": "hi"}, *shown.output, *result]
        at_once = await client.responses.create(model="mock", input=asked, tools=TOOLS)
        assert at_once.usage == continued.usage


async def test_the_sdk_parses_a_response(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the schema that it sends."""
    async with (
        fixed_text_gateway(nats_url, monkeypatch, '{"city": "Ulm"}') as gateway,
        sdk(gateway) as client,
    ):
        parsed = await client.responses.parse(model="mock", input="hi", text_format=Place)
        assert parsed.output_parsed == Place(city="Ulm")


async def test_instructions_are_not_inherited(nats_url: str) -> None:
    """Items are, and no more: the prompt has grown by them alone."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        first = await client.responses.create(
            model="mock", input="hi", instructions="be kind", max_output_tokens=4
        )
        continued = await client.responses.create(
            model="mock", input="and?", previous_response_id=first.id, max_output_tokens=4
        )
        asked: Any = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and?"},
        ]
        at_once = await client.responses.create(model="mock", input=asked, max_output_tokens=4)
        assert continued.usage is not None
        assert at_once.usage is not None
        assert continued.usage.input_tokens == at_once.usage.input_tokens
        assert continued.instructions is None


async def test_a_conversation_that_is_too_long_loses_its_beginning(nats_url: str) -> None:
    """Items are dropped if the client wants that; else the request is refused."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        asked: Any = [{"role": "user", "content": str(turn) * 4000} for turn in range(5)]
        made = await client.responses.create(
            model="mock", input=asked, max_output_tokens=4, truncation="auto"
        )
        assert made.usage is not None
        assert 4000 < made.usage.input_tokens < 8192
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="mock", input=asked, max_output_tokens=4)
        assert refused.value.code == "context_length_exceeded"


async def test_an_idempotency_key_leads_to_the_same_response(nats_url: str) -> None:
    """At any gateway, with one record."""
    async with cell(nats_url, 2) as (first, second), sdk(first) as client, sdk(second) as other:
        headers = {"Idempotency-Key": "once"}
        asked: dict[str, Any] = {"model": "mock", "input": "hi", "max_output_tokens": 8}
        one = await client.responses.create(**asked, extra_headers=headers)
        again = await other.responses.create(**asked, extra_headers=headers)
        assert again == one
        assert await other.responses.retrieve(one.id) == one


async def test_wrong_requests_are_refused_as_openai_does(nats_url: str) -> None:
    """With the status and the name of what is wrong; nothing of them is stored."""
    async with cell(nats_url) as (gateway,), sdk(gateway) as client:
        for body, param, kind in (
            ({"input": "hi", "conversation": "c"}, "conversation", openai.BadRequestError),
            ({"input": "x" * 200_000}, "prompt", openai.BadRequestError),
            (
                {"input": "hi", "previous_response_id": "resp_" + "0" * 32},
                "previous_response_id",
                openai.NotFoundError,
            ),
            ({"input": "hi", "model": "none"}, "model", openai.NotFoundError),
            ({"input": "hi", "background": True, "model": "none"}, "model", openai.NotFoundError),
        ):
            with pytest.raises(kind) as refused:
                await client.responses.create(**{"model": "mock", **body})  # type: ignore[call-overload]
            assert refused.value.param == param
        made = await client.responses.create(model="mock", input="hi", max_output_tokens=4)
        for query in ("stream=maybe", "stream=true&starting_after=-1"):
            answer = await gateway.request("GET", f"/v1/responses/{made.id}?{query}")
            assert answer.status == 400
        listed = await client.responses.input_items.list(made.id, limit=1, order="asc")
        assert not listed.has_more

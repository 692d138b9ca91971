"""`/v1/responses` with the OpenAI SDK: whole, streamed, stored, continued."""

import openai
import pytest

from tests.support.gateways import KEY, OTHER_KEY, RunningGateway, cell


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

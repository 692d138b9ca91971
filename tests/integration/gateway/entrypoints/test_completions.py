"""The walk from a client and back, through the gateway's doors."""

import pytest

from api import completion_events
from gateway.entrypoints import completions
from tests.support.gateways import cell, text_of, token_indices


async def test_a_completion_is_the_same_whole_and_streamed(nats_url: str) -> None:
    """Greedy text does not depend on how it is carried."""
    async with cell(nats_url) as (gateway,):
        whole = await gateway.complete(max_tokens=20)
        streamed = await gateway.complete(max_tokens=20, stream=True)
        async with gateway.socket() as socket:
            await socket.generate("a", max_tokens=20)
            frames = await socket.receive_rest("a")
        assert whole.status == streamed.status == 200
        assert whole.text == streamed.text == text_of(frames) != ""
        assert token_indices(frames) == list(range(20))


async def test_a_stream_that_is_silent_is_pinged(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies end what says nothing; clients skip comments."""
    monkeypatch.setattr(completions, "PING_INTERVAL_SECONDS", 0.05)
    async with cell(nats_url, mock={"itl_ms": 400}) as (gateway,):
        streamed = await gateway.complete(max_tokens=3, stream=True)
        whole = await gateway.complete(max_tokens=3)
    assert streamed.text == whole.text != ""
    assert streamed.body.count(completion_events.PING) >= 2 * 3, "between three tokens"
    assert streamed.body.endswith(completion_events.DONE)


async def test_a_stream_that_goes_on_is_not_pinged(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "PING_INTERVAL_SECONDS", 30.0)
    async with cell(nats_url, mock={"itl_ms": 5}) as (gateway,):
        streamed = await gateway.complete(max_tokens=500, stream=True)
    assert completion_events.PING not in streamed.body

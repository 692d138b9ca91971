"""The walk from a client and back, through the gateway's doors."""

from tests.integration.gateways import cell, indices, text_of


async def test_a_completion_is_the_same_whole_and_streamed(nats_url: str) -> None:
    """Greedy text does not depend on how it is carried."""
    async with cell(nats_url) as (gateway,):
        whole = await gateway.complete(max_tokens=20)
        streamed = await gateway.complete(max_tokens=20, stream=True)
        async with gateway.socket() as socket:
            await socket.generate("a", max_tokens=20)
            frames = await socket.finish("a")
        assert whole.status == streamed.status == 200
        assert whole.text == streamed.text == text_of(frames) != ""
        assert indices(frames) == list(range(20))

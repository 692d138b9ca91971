"""The Python client with a gateway that says what it is told to: refusals, losses, nonsense."""

import asyncio
from http import HTTPStatus

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from millstream_client import Cancelled, NotConnected, QueueFull, session
from tests.integration.client.fake_gateway import (
    DONE,
    TEXT_SIZE,
    FakeGatewaySocket,
    abort_connection,
    accepted_frame,
    chunk_frame,
    client_of,
    error_frame,
    generate_text,
    running_fake_gateway,
)
from tests.support.eventually import eventually


async def test_a_refusal_that_says_when_is_tried_again() -> None:
    """As the same request, whatever became of the first try."""

    async def script(peer: FakeGatewaySocket) -> None:
        for _ in range(2):
            frame = await peer.receive()
            await peer.send(error_frame(frame["id"], "queue_full", retry_after_ms=20))
        await peer.answer((await peer.receive())["id"])

    async with running_fake_gateway(script) as gateway, client_of(gateway) as client:
        assert await generate_text(client) == "xxx"
    asked = [{**frame, "id": ""} for frame in gateway.received]
    assert len(asked) == 3
    assert asked[0] == asked[1] == asked[2]


async def test_a_refusal_beyond_the_patience_is_raised() -> None:
    """Waiting in vain is worse than knowing."""

    async def script(peer: FakeGatewaySocket) -> None:
        await peer.send(
            error_frame((await peer.receive())["id"], "queue_full", retry_after_ms=5000)
        )

    async with running_fake_gateway(script) as gateway, client_of(gateway, patience=1) as client:
        with pytest.raises(QueueFull) as raised:
            await generate_text(client)
        assert raised.value.retry_after == 5


async def test_a_socket_that_drops_before_the_acceptance_is_asked_again() -> None:
    """Whether it was stored is not known; the key makes both the same request."""

    async def unsure(peer: FakeGatewaySocket) -> None:
        await peer.receive()
        await abort_connection(peer)

    async def script(peer: FakeGatewaySocket) -> None:
        await peer.answer((await peer.receive())["id"])

    async with running_fake_gateway(unsure, script) as gateway, client_of(gateway) as client:
        assert await generate_text(client) == "xxx"
    assert gateway.received[0]["idempotency_key"] == gateway.received[1]["idempotency_key"]


async def test_a_request_that_nobody_knows_any_more_is_sent_again() -> None:
    """Accepted is accepted. What comes a second time from its beginning is not seen twice."""

    async def losing(peer: FakeGatewaySocket) -> None:
        id = (await peer.receive())["id"]
        await peer.send(accepted_frame(id), chunk_frame(id, 0), chunk_frame(id, 1))
        await peer.connection.close()

    async def forgetful(peer: FakeGatewaySocket) -> None:
        await peer.send(error_frame((await peer.receive())["id"], "request_not_found"))
        await peer.answer((await peer.receive())["id"], until=5)

    async with running_fake_gateway(losing, forgetful) as gateway, client_of(gateway) as client:
        seen = [each.index async for each in client.generate(model="m", prompt="p")]
    assert seen == [0, 1, 2, 3, 4]
    first, resumed, again = gateway.received
    assert (resumed["type"], resumed["after"]) == ("resume", 1)
    assert {**again, "id": ""} == {**first, "id": ""}


async def test_a_resume_that_is_refused_is_tried_again() -> None:
    """It was accepted, so no budget and no refusal may lose it."""

    async def losing(peer: FakeGatewaySocket) -> None:
        await peer.send(accepted_frame((await peer.receive())["id"]))
        await abort_connection(peer)

    async def script(peer: FakeGatewaySocket) -> None:
        id = (await peer.receive())["id"]
        await peer.send(error_frame(id, "broker_unavailable", retry_after_ms=10))
        await peer.answer((await peer.receive())["id"])

    async with running_fake_gateway(losing, script) as gateway, client_of(gateway) as client:
        assert await generate_text(client) == "xxx"
    assert [frame["type"] for frame in gateway.received] == ["generate", "resume", "resume"]


async def test_a_gateway_that_has_lost_its_broker_is_left() -> None:
    """Another one may have it; what runs is resumed there."""

    async def cut_off(peer: FakeGatewaySocket) -> None:
        await peer.send(accepted_frame((await peer.receive())["id"]))
        id = (await peer.receive())["id"]
        await peer.send(error_frame(id, "broker_unavailable", retry_after_ms=10))

    async def healthy(peer: FakeGatewaySocket) -> None:
        for _ in range(2):
            await peer.answer((await peer.receive())["id"])

    async with (
        running_fake_gateway(cut_off, healthy) as gateway,
        client_of(gateway, gateway) as client,
    ):
        async with client.generate(model="m", prompt="runs") as running:
            assert await generate_text(client, "refused") == "xxx"
            assert await running.text() == "xxx"


async def test_a_slow_readers_rest_is_fetched_when_it_has_read_what_came() -> None:
    """Its request is opened anew behind that; what still comes under the old id is not kept."""

    async def script(peer: FakeGatewaySocket) -> None:
        id = (await peer.receive())["id"]
        await peer.send(
            accepted_frame(id), *(chunk_frame(id, index, "x" * TEXT_SIZE) for index in range(9))
        )
        resumed = await peer.receive()
        await peer.answer(resumed["id"], first=resumed["after"] + 1, until=9)

    async with running_fake_gateway(script) as gateway, client_of(gateway) as client:
        found = [chunk.index async for chunk in client.generate(model="m", prompt="p")]
    assert found == list(range(9))
    assert 0 < gateway.received[1]["after"] < 8


async def test_what_is_no_frame_ends_the_socket_and_no_request() -> None:
    """Something between here and the gateway is out of its mind."""

    async def mad(peer: FakeGatewaySocket) -> None:
        await peer.send(accepted_frame((await peer.receive())["id"]))
        await peer.connection.send("<html>")

    async def script(peer: FakeGatewaySocket) -> None:
        await peer.answer((await peer.receive())["id"])

    async with running_fake_gateway(mad, script) as gateway, client_of(gateway) as client:
        assert await generate_text(client) == "xxx"


async def test_a_gateway_that_turns_clients_away_is_passed_over() -> None:
    """It drains, or something that is no gateway has taken its place."""

    def away(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "back soon")

    async def script(peer: FakeGatewaySocket) -> None:
        await peer.answer((await peer.receive())["id"])

    async with (
        running_fake_gateway(process_request=away) as closed,
        running_fake_gateway(script) as open_,
    ):
        async with client_of(closed, open_) as client:
            assert await generate_text(client) == "xxx"
        async with client_of(closed, patience=0.1) as client:
            with pytest.raises(NotConnected, match="answers HTTP 503"):
                await generate_text(client)


async def test_more_than_a_socket_may_have_open_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway would refuse them, which is the budget's to spare."""
    monkeypatch.setattr(session, "MAX_OPEN_REQUESTS", 2)

    async def script(peer: FakeGatewaySocket) -> None:
        first, second = await peer.receive(), await peer.receive()
        hearing = asyncio.create_task(peer.receive())
        await peer.answer(second["id"])
        await peer.answer((await hearing)["id"])
        await peer.answer(first["id"])

    async with running_fake_gateway(script) as gateway, client_of(gateway) as client:
        assert (
            await asyncio.gather(*(generate_text(client, str(i)) for i in range(3))) == ["xxx"] * 3
        )


async def test_leaving_before_the_acceptance_cancels_too() -> None:
    """The gateway takes the cancel for when it has accepted."""

    async def script(peer: FakeGatewaySocket) -> None:
        await peer.receive()
        reading.cancel()
        await peer.receive()

    async with running_fake_gateway(script) as gateway, client_of(gateway) as client:
        reading = asyncio.create_task(generate_text(client))
        await asyncio.wait({reading})
        await eventually(lambda: len(gateway.received) == 2)
    asked, cancel = gateway.received
    assert cancel == {"type": "cancel", "id": asked["id"]}


async def test_a_closed_client_ends_its_streams_and_takes_no_more() -> None:
    """Whoever reads one elsewhere is told."""

    async def script(peer: FakeGatewaySocket) -> None:
        await peer.send(accepted_frame((await peer.receive())["id"]))

    async with running_fake_gateway(script) as gateway:
        async with client_of(gateway) as client:
            stream = await client.generate(model="m", prompt="p").__aenter__()
        with pytest.raises(Cancelled):
            await stream.text()
        with pytest.raises(NotConnected, match="closed"):
            await generate_text(client)


async def test_a_wait_within_the_context_may_time_out_and_go_on() -> None:
    """Who shows a spinner after a second still wants the answer."""

    async def script(peer: FakeGatewaySocket) -> None:
        id = (await peer.receive())["id"]
        await peer.send(accepted_frame(id))
        await timed_out.wait()
        await peer.send(chunk_frame(id, 0), {**DONE, "id": id})

    timed_out = asyncio.Event()
    async with running_fake_gateway(script) as gateway, client_of(gateway) as client:
        async with client.generate(model="m", prompt="p") as stream:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anext(stream)
            timed_out.set()
            assert await stream.text() == "x"
    assert len(gateway.received) == 1

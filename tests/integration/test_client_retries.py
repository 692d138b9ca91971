"""The Python client with a gateway that says what it is told to: refusals, losses, nonsense."""

import asyncio
from http import HTTPStatus

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from millstream_client import Cancelled, NotConnected, QueueFull, session
from tests.eventually import eventually
from tests.integration.peers import (
    DONE,
    SIZE,
    Peer,
    a_client,
    a_gateway,
    accepted,
    chunk,
    drop,
    refusal,
    text,
)


async def test_a_refusal_that_says_when_is_tried_again() -> None:
    """As the same request, whatever became of the first try."""

    async def script(peer: Peer) -> None:
        for _ in range(2):
            frame = await peer.hear()
            await peer.say(refusal(frame["id"], "queue_full", retry_after_ms=20))
        await peer.answer((await peer.hear())["id"])

    async with a_gateway(script) as gateway, a_client(gateway) as client:
        assert await text(client) == "xxx"
    asked = [{**frame, "id": ""} for frame in gateway.heard]
    assert len(asked) == 3
    assert asked[0] == asked[1] == asked[2]


async def test_a_refusal_beyond_the_patience_is_raised() -> None:
    """Waiting in vain is worse than knowing."""

    async def script(peer: Peer) -> None:
        await peer.say(refusal((await peer.hear())["id"], "queue_full", retry_after_ms=5000))

    async with a_gateway(script) as gateway, a_client(gateway, patience=1) as client:
        with pytest.raises(QueueFull) as raised:
            await text(client)
        assert raised.value.retry_after == 5


async def test_a_socket_that_drops_before_the_acceptance_is_asked_again() -> None:
    """Whether it was stored is not known; the key makes both the same request."""

    async def unsure(peer: Peer) -> None:
        await peer.hear()
        await drop(peer)

    async def script(peer: Peer) -> None:
        await peer.answer((await peer.hear())["id"])

    async with a_gateway(unsure, script) as gateway, a_client(gateway) as client:
        assert await text(client) == "xxx"
    assert gateway.heard[0]["idempotency_key"] == gateway.heard[1]["idempotency_key"]


async def test_a_request_that_nobody_knows_any_more_is_sent_again() -> None:
    """Accepted is accepted. What comes a second time from its beginning is not seen twice."""

    async def losing(peer: Peer) -> None:
        id = (await peer.hear())["id"]
        await peer.say(accepted(id), chunk(id, 0), chunk(id, 1))
        await peer.connection.close()

    async def forgetful(peer: Peer) -> None:
        await peer.say(refusal((await peer.hear())["id"], "request_not_found"))
        await peer.answer((await peer.hear())["id"], until=5)

    async with a_gateway(losing, forgetful) as gateway, a_client(gateway) as client:
        seen = [each.index async for each in client.generate(model="m", prompt="p")]
    assert seen == [0, 1, 2, 3, 4]
    first, resumed, again = gateway.heard
    assert (resumed["type"], resumed["after"]) == ("resume", 1)
    assert {**again, "id": ""} == {**first, "id": ""}


async def test_a_resume_that_is_refused_is_tried_again() -> None:
    """It was accepted, so no budget and no refusal may lose it."""

    async def losing(peer: Peer) -> None:
        await peer.say(accepted((await peer.hear())["id"]))
        await drop(peer)

    async def script(peer: Peer) -> None:
        id = (await peer.hear())["id"]
        await peer.say(refusal(id, "broker_unavailable", retry_after_ms=10))
        await peer.answer((await peer.hear())["id"])

    async with a_gateway(losing, script) as gateway, a_client(gateway) as client:
        assert await text(client) == "xxx"
    assert [frame["type"] for frame in gateway.heard] == ["generate", "resume", "resume"]


async def test_a_gateway_that_has_lost_its_broker_is_left() -> None:
    """Another one may have it; what runs is resumed there."""

    async def cut_off(peer: Peer) -> None:
        await peer.say(accepted((await peer.hear())["id"]))
        id = (await peer.hear())["id"]
        await peer.say(refusal(id, "broker_unavailable", retry_after_ms=10))

    async def healthy(peer: Peer) -> None:
        for _ in range(2):
            await peer.answer((await peer.hear())["id"])

    async with a_gateway(cut_off, healthy) as gateway, a_client(gateway, gateway) as client:
        async with client.generate(model="m", prompt="runs") as running:
            assert await text(client, "refused") == "xxx"
            assert await running.text() == "xxx"


async def test_a_slow_readers_rest_is_fetched_when_it_has_read_what_came() -> None:
    """Its request is opened anew behind that; what still comes under the old id is not kept."""

    async def script(peer: Peer) -> None:
        id = (await peer.hear())["id"]
        await peer.say(accepted(id), *(chunk(id, index, "x" * SIZE) for index in range(9)))
        resumed = await peer.hear()
        await peer.answer(resumed["id"], first=resumed["after"] + 1, until=9)

    async with a_gateway(script) as gateway, a_client(gateway) as client:
        found = [chunk.index async for chunk in client.generate(model="m", prompt="p")]
    assert found == list(range(9))
    assert 0 < gateway.heard[1]["after"] < 8


async def test_what_is_no_frame_ends_the_socket_and_no_request() -> None:
    """Something between here and the gateway is out of its mind."""

    async def mad(peer: Peer) -> None:
        await peer.say(accepted((await peer.hear())["id"]))
        await peer.connection.send("<html>")

    async def script(peer: Peer) -> None:
        await peer.answer((await peer.hear())["id"])

    async with a_gateway(mad, script) as gateway, a_client(gateway) as client:
        assert await text(client) == "xxx"


async def test_a_gateway_that_turns_clients_away_is_passed_over() -> None:
    """It drains, or something that is no gateway has taken its place."""

    def away(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "back soon")

    async def script(peer: Peer) -> None:
        await peer.answer((await peer.hear())["id"])

    async with a_gateway(process_request=away) as closed, a_gateway(script) as open_:
        async with a_client(closed, open_) as client:
            assert await text(client) == "xxx"
        async with a_client(closed, patience=0.1) as client:
            with pytest.raises(NotConnected, match="answers HTTP 503"):
                await text(client)


async def test_more_than_a_socket_may_have_open_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway would refuse them, which is the budget's to spare."""
    monkeypatch.setattr(session, "MOST_OPEN", 2)

    async def script(peer: Peer) -> None:
        first, second = await peer.hear(), await peer.hear()
        hearing = asyncio.create_task(peer.hear())
        await peer.answer(second["id"])
        await peer.answer((await hearing)["id"])
        await peer.answer(first["id"])

    async with a_gateway(script) as gateway, a_client(gateway) as client:
        assert await asyncio.gather(*(text(client, str(i)) for i in range(3))) == ["xxx"] * 3


async def test_leaving_before_the_acceptance_cancels_too() -> None:
    """The gateway takes the cancel for when it has accepted."""

    async def script(peer: Peer) -> None:
        await peer.hear()
        reading.cancel()
        await peer.hear()

    async with a_gateway(script) as gateway, a_client(gateway) as client:
        reading = asyncio.create_task(text(client))
        await asyncio.wait({reading})
        await eventually(lambda: len(gateway.heard) == 2)
    asked, cancel = gateway.heard
    assert cancel == {"type": "cancel", "id": asked["id"]}


async def test_a_closed_client_ends_its_streams_and_takes_no_more() -> None:
    """Whoever reads one elsewhere is told."""

    async def script(peer: Peer) -> None:
        await peer.say(accepted((await peer.hear())["id"]))

    async with a_gateway(script) as gateway:
        async with a_client(gateway) as client:
            stream = await client.generate(model="m", prompt="p").__aenter__()
        with pytest.raises(Cancelled):
            await stream.text()
        with pytest.raises(NotConnected, match="closed"):
            await text(client)


async def test_a_wait_within_the_context_may_time_out_and_go_on() -> None:
    """Who shows a spinner after a second still wants the answer."""

    async def script(peer: Peer) -> None:
        id = (await peer.hear())["id"]
        await peer.say(accepted(id))
        await timed_out.wait()
        await peer.say(chunk(id, 0), {**DONE, "id": id})

    timed_out = asyncio.Event()
    async with a_gateway(script) as gateway, a_client(gateway) as client:
        async with client.generate(model="m", prompt="p") as stream:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anext(stream)
            timed_out.set()
            assert await stream.text() == "x"
    assert len(gateway.heard) == 1

"""Draining: nothing new comes in, what runs is finished, every socket is sent elsewhere."""

import asyncio
import json
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError, ConnectionClosedOK, InvalidStatus

from tests.integration.gateway.conftest import Transport
from tests.support.eventually import eventually
from tests.support.gateways import GatewaySocket, RunningGateway, cell, token_indices

SLOW = {"ttft_ms": 1, "itl_ms": 2}


async def test_running_streams_finish_and_nothing_new_comes_in(
    nats_url: str, transport: Transport
) -> None:
    """The last frame arrives before the close; readiness tells the load balancer at once."""
    async with cell(nats_url, mock=SLOW, **transport) as (gateway,):
        async with gateway.socket() as idle, gateway.socket() as busy:
            await busy.generate("a", max_tokens=400)
            frames = await busy.receive_until("a", "chunk")
            streaming = asyncio.create_task(gateway.complete(max_tokens=400, stream=True))
            await eventually(lambda: follows(gateway, 2))
            gateway.stop.set()
            await eventually(lambda: is_draining(gateway))
            refused = await gateway.complete()
            assert (refused.status, refused.error["code"]) == (503, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            with pytest.raises(InvalidStatus, match="503"):
                async with gateway.socket():
                    raise AssertionError
            assert await idle.receive() == {"type": "draining"}
            assert await closing_code(idle) == 1001
            await busy.generate("b")
            while frames[-1]["type"] != "done":
                frames.append(await busy.receive())
            assert frames.count({"type": "draining"}) == 1
            (late,) = (frame for frame in frames if frame.get("id") == "b")
            assert late["code"] == "overloaded"
            assert token_indices(frames) == list(range(400))
            assert await closing_code(busy) == 1001
            assert (await streaming).body.endswith(b"data: [DONE]\n\n")


async def follows(gateway: RunningGateway, count: int) -> bool:
    return await gateway.followed_requests() == count


async def is_draining(gateway: RunningGateway) -> bool:
    return (await gateway.request("GET", "/readyz", key=None)).status == 503


async def closing_code(socket: Any) -> int:
    with pytest.raises((ConnectionClosedOK, ConnectionClosedError)) as closed:
        await socket.receive()
    assert closed.value.rcvd is not None
    return int(closed.value.rcvd.code)


async def test_what_does_not_finish_in_time_is_cut_and_can_be_resumed(
    nats_url: str, transport: Transport
) -> None:
    """The process ends within its time whatever its clients do; another gateway goes on."""
    async with cell(nats_url, 2, drain_seconds=0.3, mock=SLOW, **transport) as (first, second):
        async with first.socket() as socket:
            await socket.generate("a", max_tokens=1000)
            frames = await socket.receive_until("a", "chunk")
            first.stop.set()
            with pytest.raises((ConnectionClosedOK, ConnectionClosedError)):
                await take_all(socket, frames)
        async with second.socket() as again:
            request_id = frames[0]["request_id"]
            after = token_indices(frames)[-1]
            await again.send(type="resume", id="a", request_id=request_id, after=after)
            frames += await again.receive_rest("a")
        assert frames[-1]["finish_reason"] == "length"
        assert token_indices(frames) == list(range(1000))


async def test_a_stream_over_http_that_is_cut_says_so(nats_url: str, transport: Transport) -> None:
    """A client must not take what it got for the whole answer."""
    async with cell(nats_url, drain_seconds=0.3, mock=SLOW, **transport) as (gateway,):
        streaming = asyncio.create_task(gateway.complete(max_tokens=1000, stream=True))
        await eventually(lambda: follows(gateway, 1))
        gateway.stop.set()
        *_, last, end = (await streaming).body.split(b"\n\n")
        assert end == b""
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "overloaded"


async def take_all(socket: GatewaySocket, frames: list[dict[str, Any]]) -> None:
    while True:
        frames.append(await socket.receive())


async def test_orphans_do_not_delay_the_end(nats_url: str, transport: Transport) -> None:
    """A dropped socket's requests wait for nobody here: they are resumed elsewhere."""
    async with cell(nats_url, 2, grace_seconds=60, mock=SLOW, **transport) as (first, second):
        async with first.socket() as socket:
            await socket.generate("a", max_tokens=600)
            frames = await socket.receive_until("a", "chunk")
            socket.connection.transport.abort()
            await socket.connection.wait_closed()
        first.stop.set()
        await eventually(lambda: is_gone(first), seconds=2)
        async with second.socket() as again:
            await again.send(type="resume", id="a", request_id=frames[0]["request_id"], after=-1)
            assert (await again.receive_until("a", "chunk"))[-1]["index"] == 0


async def is_gone(gateway: RunningGateway) -> bool:
    try:
        await gateway.request("GET", "/healthz", key=None)
    except (OSError, asyncio.IncompleteReadError):  # refused, or closed before it answered
        return True
    return False

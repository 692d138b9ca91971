"""`millstream up --gateways N`: several gateways on one port, of which any may die."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from millstream.up import state_file
from tests.support.eventually import eventually
from tests.support.gateways import KEY, GatewaySocket, RunningGateway, text_of, token_indices
from tests.support.millstream_up import MillstreamUp, is_gone

COUNT = 2
CONNECTIONS = 40


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MillstreamUp]:
    words = ["--model", "mock", "--mock-ttft-ms", "5", "--mock-itl-ms", "10", "--api-key", KEY]
    home = tmp_path_factory.mktemp("up")
    with MillstreamUp(home, *words, "--gateways", str(COUNT)) as running:
        yield running.wait_until_ready()


@pytest.fixture
def client(up: MillstreamUp) -> RunningGateway:
    return RunningGateway(up.port, asyncio.Event())


async def all_serve(up: MillstreamUp) -> list[int]:
    """Process ids of the gateways, once each of them accepts connections."""

    async def each_answers_alone() -> list[int]:
        pids = up.pids("gateway")
        if len(pids) != COUNT:
            return []
        answered = [await answers_alone(up, pid, pids) for pid in pids]
        return pids if all(answered) else []

    return await eventually(each_answers_alone)


async def answers_alone(up: MillstreamUp, pid: int, pids: list[int]) -> bool:
    """Return True if a gateway answers while the others are stopped."""
    others = [each for each in pids if each != pid]
    for each in others:
        os.kill(each, signal.SIGSTOP)
    try:
        async with asyncio.timeout(5):
            return await RunningGateway(up.port, asyncio.Event()).is_ready()
    except TimeoutError:
        return False
    finally:
        for each in others:
            os.kill(each, signal.SIGCONT)


async def complete_all(client: RunningGateway) -> list[int]:
    """Statuses of requests that come at once, each on a connection of its own."""
    answers = [client.complete(max_tokens=4) for _ in range(CONNECTIONS)]
    return [answer.status for answer in await asyncio.gather(*answers)]


async def test_all_are_told_of_and_each_of_them_serves(up: MillstreamUp) -> None:
    state = state_file.read(up.home / "data")
    assert state
    assert state.gateways == ("gateway-1", "gateway-2")
    assert all((up.home / f"data/logs/{name}.log").exists() for name in state.gateways)
    assert len(await all_serve(up)) == COUNT


async def test_a_gateway_that_hangs_gets_no_connection(
    up: MillstreamUp, client: RunningGateway
) -> None:
    """With a socket of its own the kernel would go on giving it half of all clients."""
    hanging, _ = await all_serve(up)
    os.kill(hanging, signal.SIGSTOP)
    try:
        assert await complete_all(client) == [200] * CONNECTIONS
    finally:
        os.kill(hanging, signal.SIGCONT)


async def test_a_killed_gateway_is_missed_by_no_new_client(
    up: MillstreamUp, client: RunningGateway
) -> None:
    """Its connections are gone; new ones go to the others, and to the one that takes its place."""
    killed, other = await all_serve(up)
    os.kill(killed, signal.SIGKILL)
    await eventually(partial(is_gone_async, killed))
    assert await complete_all(client) == [200] * CONNECTIONS
    again = await all_serve(up)
    assert other in again
    assert killed not in again


async def is_gone_async(pid: int) -> bool:
    return is_gone(pid)


async def test_a_socket_is_resumed_at_another_gateway(
    up: MillstreamUp, client: RunningGateway
) -> None:
    """The one that had it is killed in mid-stream."""
    serving, other = await all_serve(up)
    os.kill(other, signal.SIGSTOP)
    async with client.socket() as socket:
        os.kill(other, signal.SIGCONT)
        await socket.generate("a", max_tokens=300, seed=3)
        frames = await socket.receive_until("a", "accepted")
        frames += await socket.receive_until("a", "chunk")
        os.kill(serving, signal.SIGKILL)
        frames += await rest_of(socket)
    after = token_indices(frames)[-1]
    async with client.socket() as socket:
        request_id = frames[0]["request_id"]
        await socket.send(type="resume", id="b", request_id=request_id, after=after)
        rest = await socket.receive_rest("b")
        assert rest[-1]["type"] == "done"
        assert token_indices(frames + rest) == list(range(300))
        await socket.generate("c", max_tokens=300, seed=3)
        whole = await socket.receive_rest("c")
    assert text_of(frames + rest) == text_of(whole)


async def rest_of(socket: GatewaySocket) -> list[dict[str, Any]]:
    """Frames that still come before the connection breaks."""
    frames = []
    try:
        while True:
            frames.append(await socket.receive())
    except ConnectionClosed:
        return frames


def test_the_port_is_refused_after_the_end(tmp_path: Path) -> None:
    """Nobody waits for a gateway that will never come."""
    words = ["--model", "mock", "--api-key", KEY, "--gateways", "2"]
    with MillstreamUp(tmp_path / "home", *words) as up:
        up.wait_until_ready()
        assert up.stop() == 0
        client = RunningGateway(up.port, asyncio.Event())
        assert asyncio.run(client.answers()) is False

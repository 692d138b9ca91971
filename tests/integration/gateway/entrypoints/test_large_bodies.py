"""What is large is read beside the event loop, in its turn, and counts by its bytes."""

import json
import threading
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest

from gateway.admission.offload_thread import OFFLOAD_BYTES
from gateway.entrypoints import endpoint
from gateway.entrypoints import websocket as socket_door
from gateway.server.connection_limits import FRAME_BYTES, FrameRateLimiter
from tests.support.gateways import RunningGateway, cell


@pytest.fixture
async def gateway(nats_url: str) -> AsyncIterator[RunningGateway]:
    async with cell(nats_url) as (gateway,):
        yield gateway


class Witness:
    """Notes in which threads a function of a module is called."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        self.threads: list[threading.Thread] = []
        self._act = getattr(module, name)
        patch.setattr(module, name, self)

    def __call__(self, *args: Any) -> Any:
        self.threads.append(threading.current_thread())
        return self._act(*args)


@pytest.mark.parametrize(("module", "read"), [(endpoint, "parse"), (socket_door, "parse_frame")])
async def test_what_is_large_is_read_beside_the_event_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, module: ModuleType, read: str
) -> None:
    """Every stream of the gateway would stand still meanwhile; a small one is not worth the way."""
    witnesses = [Witness(monkeypatch, module, name) for name in ("decode", read)]

    async def ask(prompt: list[int]) -> None:
        if module is endpoint:
            await gateway.complete(prompt, n=0)
            return
        async with gateway.socket() as socket:
            await socket.send(type="generate", id="a", model="mock", prompt=prompt, n=0)
            await socket.receive()

    for prompt in ([1], [1] * OFFLOAD_BYTES):
        await ask(prompt)
    for witness in witnesses:
        small, large = witness.threads
        assert (small, large is small) == (threading.current_thread(), False)


async def test_a_cancel_does_not_overtake_the_large_frame_before_it(
    gateway: RunningGateway,
) -> None:
    """Small frames are read at once, and large ones elsewhere."""
    wanted = {"type": "generate", "model": "mock", "prompt": "x", "max_tokens": 4000}
    async with gateway.socket() as socket:
        ids = list(map(str, range(5)))
        for id in ids:
            await socket.connection.send(json.dumps(wanted | {"id": id}) + " " * OFFLOAD_BYTES)
            await socket.send(type="cancel", id=id)
        ends: list[Any] = []
        while len(ends) < len(ids):
            frame = await socket.receive()
            ends += [frame] if frame["type"] in ("done", "error") else []
        assert [(end.get("finish_reason"), end.get("code")) for end in ends] == [
            ("cancelled", None)
        ] * len(ids)


async def test_bytes_count_against_the_pace(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused costs its reading; a body over HTTP costs the same."""
    counted: list[int] = []

    def take(self: FrameRateLimiter, now: float, frames: int = 1) -> float:
        counted.append(frames)
        return 0.0

    monkeypatch.setattr(FrameRateLimiter, "reserve", take)
    async with gateway.socket() as socket:
        for _ in range(2):
            await socket.connection.send("{" * 10 * FRAME_BYTES)
            assert (await socket.receive())["code"] == "invalid_request"
    await gateway.complete(["x"] * 4 * FRAME_BYTES)
    assert (await gateway.complete()).status == 200
    assert counted == [11, 11, 4 * 5]

"""The broker goes away, freezes and comes back; what was accepted is finished, exactly."""

import asyncio
import signal
from typing import Any

import dispatcher.service
import gpu_worker.service
from streams.broker.countdown import running_timeout
from tests.support.eventually import eventually
from tests.support.gateways import (
    GatewaySocket,
    RunningGateway,
    cell,
    gateways,
    register,
    tenants,
    text_of,
    token_indices,
)
from tests.support.nats_server import NatsServer
from tests.support.services import dispatcher_settings, running, worker_settings

SLOW = {"ttft_ms": 1, "itl_ms": 3}
LATEST = 3.0  # seconds until a client must know


async def refusals(gateway: RunningGateway, count: int) -> set[tuple[int, str, bool]]:
    async with running_timeout(LATEST):
        answers = await asyncio.gather(*(gateway.complete() for _ in range(count)))
    return {(a.status, a.error["code"], "retry-after" in a.headers) for a in answers}


async def refused_frame(socket: GatewaySocket, id: str) -> dict[str, Any]:
    await socket.generate(id)
    return (await socket.receive_rest(id, seconds=LATEST))[-1]


async def serves(gateway: RunningGateway) -> bool:
    return (await gateway.complete()).status == 200


async def test_without_a_broker_requests_are_refused_in_time(nats_server: NatsServer) -> None:
    """503 with Retry-After and an error frame within 3 s, however many ask; then it serves."""
    async with (
        cell(nats_server.url) as (gateway,),
        gateway.socket() as one,
        gateway.socket() as two,
    ):
        nats_server.kill()
        await two.send(type="resume", id="r", request_id="0a", after=-1)
        refused, error, resumed = await asyncio.gather(
            refusals(gateway, 20), refused_frame(one, "a"), two.receive_rest("r", seconds=LATEST)
        )
        assert refused == {(503, "broker_unavailable", True)}
        assert (error["code"], error["retry_after_ms"] > 0) == ("broker_unavailable", True)
        assert resumed[-1]["code"] == "broker_unavailable"
        assert (await gateway.request("GET", "/readyz", key=None)).status == 503
        assert (await gateway.request("GET", "/healthz", key=None)).status == 200
        nats_server.restart()
        await eventually(lambda: serves(gateway))
        await one.generate("b")
        assert (await one.receive_rest("b"))[-1]["type"] == "done"


async def test_a_frozen_broker_is_told_in_time_too(nats_server: NatsServer) -> None:
    """Keys and limits need it more than once; the client's patience is the same."""
    limits = {**tenants(max_queued=5)}
    async with cell(nats_server.url, tenants=limits) as (gateway,):
        nats_server.process.send_signal(signal.SIGSTOP)
        try:
            async with running_timeout(LATEST + 0.5):
                keyed = [
                    gateway.complete(headers={"Idempotency-Key": str(i % 3)}) for i in range(6)
                ]
                answers = await asyncio.gather(*keyed, *(gateway.complete() for _ in range(6)))
        finally:
            nats_server.process.send_signal(signal.SIGCONT)
        assert {answer.error["code"] for answer in answers} == {"broker_unavailable"}
        await eventually(lambda: serves(gateway))


async def test_a_running_stream_goes_on_exactly_after_a_restart(nats_server: NatsServer) -> None:
    """The logs were in the broker's memory; their writers put them back, and no token repeats."""
    async with cell(nats_server.url, mock=SLOW) as (gateway,), gateway.socket() as socket:
        wanted = (await gateway.complete(max_tokens=300)).text
        for id in ("a", "b"):
            await socket.generate(id, max_tokens=300)
        frames = [await socket.receive()]
        while len(token_indices(frames)) < 50:
            frames.append(await socket.receive())
        nats_server.restart()
        while sum(frame["type"] in ("done", "error") for frame in frames) < 2:
            frames.append(await socket.receive(30))
        for id in ("a", "b"):
            mine = [frame for frame in frames if frame["id"] == id]
            assert mine[-1]["type"] == "done"
            assert token_indices(mine) == list(range(300))
            assert text_of(mine) == wanted


async def test_an_http_stream_goes_on_exactly_too(nats_server: NatsServer) -> None:
    """Whichever door it came through."""
    async with cell(nats_server.url, mock=SLOW) as (gateway,):
        wanted = (await gateway.complete(max_tokens=300)).text
        asking = asyncio.create_task(gateway.complete(max_tokens=300, stream=True))
        await eventually(gateway.followed_requests)
        nats_server.restart()
        answer = await asking
        assert answer.text == wanted
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_what_was_queued_is_served_after_a_restart(nats_server: NatsServer) -> None:
    """Requests are on disk: accepted means that it ends."""
    await register(nats_server.url)
    async with gateways(nats_server.url) as (gateway,), gateway.socket() as socket:
        for i in range(10):
            await socket.generate(str(i), max_tokens=5)
        for _ in range(10):
            assert (await socket.receive())["type"] == "accepted"
        nats_server.restart()
        async with (
            running(dispatcher.service, dispatcher_settings(nats_server.url)),
            running(gpu_worker.service, worker_settings(nats_server.url)),
        ):
            ended: dict[str, str] = {}
            while len(ended) < 10:
                frame = await socket.receive(20)
                if "usage" in frame:
                    ended[frame["id"]] = frame["finish_reason"]
        assert set(ended.values()) == {"length"}


async def test_a_stream_whose_worker_died_too_goes_on_or_ends(nats_server: NatsServer) -> None:
    """Nobody has the log then: the next attempt begins anew, and the client sees no token twice."""
    await register(nats_server.url, **SLOW)
    url = nats_server.url
    async with gateways(url) as (gateway,), running(dispatcher.service, dispatcher_settings(url)):
        async with gateway.socket() as socket:
            doomed = asyncio.create_task(
                gpu_worker.service.run(worker_settings(url, ack_wait_seconds=3), asyncio.Event())
            )
            await socket.generate("a", max_tokens=300)
            frames = await socket.receive_until("a", "chunk")
            doomed.cancel()
            await asyncio.wait([doomed])
            nats_server.restart()
            async with running(gpu_worker.service, worker_settings(url, ack_wait_seconds=3)):
                frames += await socket.receive_rest("a")
                wanted = (await gateway.complete(max_tokens=300)).text
    assert frames[-1]["type"] == "done"
    assert token_indices(frames) == list(range(300))
    assert text_of(frames) == wanted

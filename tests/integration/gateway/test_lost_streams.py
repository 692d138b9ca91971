"""Streams are deleted, edited, lost with the disk: they come back, or readiness says no."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from streams import topology
from streams.broker.broker_client import Broker
from streams.topology import Scale
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway, cell, gateways, register
from tests.support.nats_server import NatsServer
from tests.support.services import dispatcher_settings, running, worker_settings

SLOW = {"ttft_ms": 1, "itl_ms": 20}
STREAMS = [config.name or "" for config in topology.stream_configs(Scale(), 1)]
BUCKETS = ["KV_idempotency", "KV_registry", "KV_tenants", "KV_leases"]


@asynccontextmanager
async def operator(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "operator") as broker:
        yield broker


async def exists(broker: Broker, stream: str) -> bool:
    return stream in {info.config.name for info in await broker.js.streams_info()}


async def edit(broker: Broker, stream: str, **changes: Any) -> None:
    config = (await broker.js.stream_info(stream)).config
    await broker.js.update_stream(config.evolve(**changes))


async def is_served(gateway: RunningGateway) -> bool:
    answer = await gateway.complete(headers={"Idempotency-Key": "same"})
    return answer.status == 200


async def readiness(gateway: RunningGateway) -> tuple[int, list[str]]:
    answer = await gateway.request("GET", "/readyz", key=None)
    return answer.status, answer.json["unusable_streams"]


async def test_every_stream_that_is_deleted_comes_back(nats_url: str) -> None:
    """Also while nobody uses it: the first request after it would hang, or be refused."""
    async with cell(nats_url) as (gateway,), operator(nats_url) as broker:
        for stream in [*STREAMS, *BUCKETS]:
            await broker.js.delete_stream(stream)
            await eventually(lambda stream=stream: exists(broker, stream))  # type: ignore[misc]
        await eventually(lambda: is_served(gateway))
        assert await readiness(gateway) == (200, [])


@pytest.mark.parametrize(
    "stream", ["WORK", "TOKENS_0", "REQUESTS", "LEDGER", "ATTEMPTS", "SIGNALS"]
)
async def test_a_stream_deleted_under_load_loses_no_end(nats_url: str, stream: str) -> None:
    """Each running request goes on or ends with an error; none waits for its deadline."""
    async with cell(nats_url, mock=SLOW) as (gateway,), operator(nats_url) as broker:
        asked = [asyncio.create_task(gateway.complete(max_tokens=100)) for _ in range(8)]
        await eventually(lambda: _has_messages(broker, "TOKENS_0"))
        await broker.js.delete_stream(stream)
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} <= {200, 503}
        await eventually(lambda: is_served(gateway))


async def _has_messages(broker: Broker, stream: str) -> bool:
    return (await broker.js.stream_info(stream)).state.messages > 0


async def test_queued_requests_end_with_the_stream_that_held_them(nats_url: str) -> None:
    """Their dispatcher alone knows of them: the clients would wait for ten minutes."""
    await register(nats_url)
    async with (
        gateways(nats_url) as (gateway,),
        operator(nats_url) as broker,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        async with running(gpu_worker.service, worker_settings(nats_url)):
            await eventually(gateway.is_ready)
        asked = [asyncio.create_task(gateway.complete()) for _ in range(3)]
        await eventually(lambda: _is_waiting(broker, 3))
        await broker.js.delete_stream("REQUESTS")
        answers = await asyncio.gather(*asked)
        assert {(a.status, a.error["code"]) for a in answers} == {(503, "work_lost")}
        async with running(gpu_worker.service, worker_settings(nats_url)):
            await eventually(lambda: is_served(gateway))


async def _is_waiting(broker: Broker, count: int) -> bool:
    return (await broker.js.stream_info("REQUESTS")).state.messages == count


EDITS: dict[str, dict[str, Any]] = {
    "message size": {"max_msg_size": 100},
    "messages": {"max_msgs": 1},
    "bytes": {"max_bytes": 64},
    "age": {"max_age": 1.0, "duplicate_window": 1.0},
    "no acknowledgements": {"no_ack": True},
    "other subjects": {"subjects": ["elsewhere.>"]},
}


@pytest.mark.parametrize("stream", ["WORK", "REQUESTS", "TOKENS_0"])
@pytest.mark.parametrize("changes", EDITS.values(), ids=EDITS.keys())
async def test_an_edited_stream_is_mended(
    nats_url: str, stream: str, changes: dict[str, Any]
) -> None:
    """An operator's mistake must not end in requests that are accepted and hang."""
    async with cell(nats_url) as (gateway,), operator(nats_url) as broker:
        await edit(broker, stream, **changes)
        await eventually(lambda: is_served(gateway))
        await eventually(lambda: _is_as_declared(broker, stream, changes))


async def _is_as_declared(broker: Broker, stream: str, changes: dict[str, Any]) -> bool:
    known = (await broker.js.stream_info(stream)).config
    return not any(getattr(known, name) == value for name, value in changes.items())


async def test_what_cannot_be_mended_fails_readiness_and_refuses(nats_url: str) -> None:
    """A sealed stream stays sealed: no request is accepted that could not end."""
    async with cell(nats_url) as (gateway,), operator(nats_url) as broker:
        await edit(broker, "WORK", sealed=True)
        await eventually(lambda: _is_unready(gateway, ["WORK"]))
        answer = await gateway.complete()
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        metrics = (await gateway.request("GET", "/metrics")).body.decode()
        assert 'millstream_unusable_stream{stream="WORK"} 1.0' in metrics
        await broker.js.delete_stream("WORK")  # an operator's way out
        await eventually(lambda: is_served(gateway))
        assert await readiness(gateway) == (200, [])


async def _is_unready(gateway: RunningGateway, streams: list[str]) -> bool:
    return await readiness(gateway) == (503, streams)


async def test_running_requests_end_when_their_log_cannot_be_written(nats_url: str) -> None:
    """No terminal can be stored, so the gateway itself ends them."""
    async with cell(nats_url, mock=SLOW) as (gateway,), operator(nats_url) as broker:
        asked = asyncio.create_task(gateway.complete(max_tokens=500))
        await eventually(lambda: _has_messages(broker, "TOKENS_0"))
        await edit(broker, "TOKENS_0", sealed=True)
        answer = await asked
        assert (answer.status, answer.error["code"]) == (503, "broker_unavailable")


async def test_a_store_that_is_wiped_leaves_nobody_outside(nats_server: NatsServer) -> None:
    """Tenants, keys and models were in it; gateways know them, and put them back."""
    async with cell(nats_server.url, 2) as found:
        for _ in range(2):
            nats_server.wipe()
            nats_server.start()
            for gateway in found:
                await eventually(lambda gateway=gateway: is_served(gateway))  # type: ignore[misc]
                models = (await gateway.request("GET", "/v1/models")).json["data"]
                assert {"mock", "vectors"} <= {model["id"] for model in models}

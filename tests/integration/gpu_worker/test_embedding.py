"""Unary work goes the same way as generation, in records of bounded size."""

import pytest

import dispatcher.service
import gpu_worker.service
from gpu_worker.attempt.output_buffer import MAX_RESULT_BYTES
from streams import messages
from streams.messages import Request
from streams.records.token_log import TokenLog
from streams.subjects import LogAddress
from tests.support.eventually import eventually
from tests.support.services import (
    ROUTE,
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)

DIMENSIONS = 1024
QUICK = {"ttft_ms": 1, "itl_ms": 1}


def vectors(c: BrokerClient, request: str) -> list[bytes]:
    """All vectors, whose records follow each other without a gap."""
    found: list[bytes] = []
    for record in c.records[request]:
        if record["type"] == "result":
            assert record["index"] == len(found)
            assert record["count"] == len(record["vectors"])
            assert sum(map(len, record["vectors"])) <= MAX_RESULT_BYTES
            found += record["vectors"]
    return found


async def test_many_vectors_come_in_several_records(nats_url: str) -> None:
    """One message for all of them would be larger than the broker takes."""
    async with (
        broker_client(nats_url, **QUICK) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        inputs = [f"input {i}" for i in range(120)]
        request = await c.embed(inputs, DIMENSIONS)
        terminal = await eventually(lambda: c.terminal(request))
        assert c.record_counts(request)["result"] == 8
        assert len(vectors(c, request)) == 120
        assert len({*vectors(c, request)}) == 120
        assert terminal["usage"]["completion_tokens"] == 0
        assert terminal["usage"]["prompt_tokens"] == sum(map(len, inputs))


@pytest.mark.parametrize("stored", [2, 5])
async def test_a_second_attempt_adds_only_the_vectors_that_are_missing(
    nats_url: str, stored: int
) -> None:
    """Those of the first attempt were seen; twice would be wrong. None may be missing at all."""
    async with broker_client(nats_url, **QUICK) as c:
        inputs = [messages.pack_tokens(list(f"input {i}".encode())) for i in range(5)]
        payload = Request("embed", inputs=inputs, dimensions=8).pack()
        async with running(gpu_worker.service, worker_settings(nats_url)):
            whole = await c.publish_work(c.envelope(30, 0), payload)
            await eventually(lambda: c.terminal(whole))
            envelope = c.envelope(30, 0)
            log = TokenLog(c.broker, LogAddress("acme", ROUTE, envelope.request_id), 1)
            await log.claim("mock", "1", "dead")
            part = vectors(c, whole)[:stored]
            await log.append({"type": "result", "index": 0, "count": stored, "vectors": part})
            request = await c.publish_work(envelope, payload)
            await eventually(lambda: c.terminal(request))
            assert c.attempts(request) == [1, 2]
            assert vectors(c, request) == vectors(c, whole)

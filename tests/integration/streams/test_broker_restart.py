"""The broker restarts alone and forgets what it had in memory: everything ends all the same."""

from collections.abc import Callable

import pytest

import dispatcher.service
import gpu_worker.service
from gateway.replies.relay import Relay
from streams import messages, subjects, topology
from streams.broker import declaration
from streams.messages import Request, Sampling
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import cell, token_indices
from tests.support.nats_server import NatsServer
from tests.support.services import broker_client, dispatcher_settings, running, worker_settings

SLOW = {"ttft_ms": 5, "itl_ms": 10, "sequences": 8}


async def test_what_runs_and_what_waits_ends_once(nats_server: NatsServer) -> None:
    """Token logs, leases and credit are gone; requests, work and the ledger are on disk."""
    url = nats_server.url
    async with (
        broker_client(url, **SLOW) as c,
        running(dispatcher.service, dispatcher_settings(url)),
        running(gpu_worker.service, worker_settings(url, beat_seconds=0.2, ack_wait_seconds=3)),
    ):
        requests = [await c.send(f"prompt {i}", max_tokens=80) for i in range(24)]
        await eventually(lambda: sum(len(records) > 3 for records in c.records.values()) >= 8)
        nats_server.restart()
        await eventually(lambda: all(c.terminal(r) for r in requests))
        await eventually(c.is_idle)
        for request in requests:
            log = await c.read_log(request)
            assert [r["type"] for r in log.records].count("done") == 1
            assert len(log.tokens) == 80
            assert log.attempts >= 1
        assert await c.ledger_counts() == dict.fromkeys(requests, 1)
        again = await c.send("prompt 0", max_tokens=80)
        await eventually(lambda: c.terminal(again))
        assert (await c.read_log(requests[0])).tokens == c.tokens(again)


async def test_an_end_that_nobody_heard_is_put_back(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may die when it has stored a terminal, and not passed it on: its worker has it."""
    passed: Callable[[Relay, bytes, bytes, bytes], None] = Relay._on_reply
    lost: list[bytes] = []

    def lose_the_end(self: Relay, subject: bytes, data: bytes, headers: bytes) -> None:
        if messages.unpack(data)["type"] == "done" and not lost:
            lost.append(data)
        else:
            passed(self, subject, data, headers)

    monkeypatch.setattr(Relay, "_on_reply", lose_the_end)
    async with (
        cell(nats_server.url, mock=SLOW) as (gateway,),
        gateway.socket() as socket,
        connect(nats_server.url, "test") as broker,
    ):
        await socket.generate("a", max_tokens=20)
        await eventually(lambda: broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS))
        nats_server.restart()
        assert token_indices(await socket.receive_until("a", "done")) == list(range(20))


async def test_a_log_that_was_lost_can_be_resumed(nats_server: NatsServer) -> None:
    """Its worker lives and puts it back; the client that comes for it need not know."""
    async with (
        cell(nats_server.url, mock=SLOW) as (gateway,),
        gateway.socket() as socket,
        connect(nats_server.url, "test") as broker,
    ):
        await socket.generate("a", max_tokens=20)
        request_id = (await socket.receive_until("a", "done"))[0]["request_id"]
        nats_server.restart()
        await declaration.wait_for_stream(broker, topology.token_stream_name(0))
        await socket.send(type="resume", id="again", request_id=request_id, after=-1)
        assert token_indices(await socket.receive_until("again", "done")) == list(range(20))


async def test_a_worker_knows_what_runs_and_what_has_ended(nats_url: str) -> None:
    """Who misses a log asks it while no dispatcher leads; another tenant gets no answer."""
    async with (
        broker_client(nats_url, **SLOW) as c,
        running(gpu_worker.service, worker_settings(nats_url)),
    ):
        asked = Request("generate", messages.pack_tokens([1]), sampling=Sampling(max_tokens=80))
        request = await c.publish_work(c.envelope(1, 80), asked.pack())
        await eventually(lambda: c.record_counts(request)["chunk"])
        await eventually(lambda: c.broker.request(subjects.find("acme", request)))
        await eventually(lambda: c.terminal(request))
        await eventually(lambda: c.broker.request(subjects.find("acme", request)))
        assert await c.broker.request(subjects.find("other", request), seconds=0.3) is None

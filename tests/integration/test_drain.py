"""A worker that stops finishes what it can, and hands the rest to another."""

from nats.aio.msg import Msg

import dispatcher.service
import gpu_worker.service
from streams import messages, subjects
from streams.messages import Beat, Request
from tests.eventually import eventually
from tests.integration.services import a_dispatcher, a_worker, client, running

SLOW = {"ttft_ms": 1, "itl_ms": 5}
PAYLOAD = Request("generate", messages.pack_tokens(list(b"hello"))).pack()


async def test_what_can_finish_in_time_does(nats_url: str) -> None:
    """A rolling restart is not seen by clients."""
    async with (
        client(nats_url, **SLOW) as c,
        running(dispatcher.service, a_dispatcher(nats_url)),
    ):
        async with running(gpu_worker.service, a_worker(nats_url, drain_seconds=10)):
            requests = [await c.send(max_tokens=60) for _ in range(5)]
            await eventually(lambda: all(request in c.records for request in requests))
        assert all(c.terminal(request) for request in requests)
        assert all(c.attempts(request) == [1] for request in requests)


async def test_what_cannot_finish_in_time_is_continued_by_another(nats_url: str) -> None:
    """At once, not after an ack wait, which is a minute here."""
    async with (
        client(nats_url, **SLOW) as c,
        running(dispatcher.service, a_dispatcher(nats_url)),
    ):
        leaving = a_worker(nats_url, drain_seconds=0.1, ack_wait_seconds=60)
        async with running(gpu_worker.service, leaving):
            request = await c.send(max_tokens=200)
            await eventually(lambda: len(c.records.get(request, [])) > 5)
        assert c.terminal(request) is None
        async with running(gpu_worker.service, a_worker(nats_url, ack_wait_seconds=60)):
            await eventually(lambda: c.terminal(request))
        assert c.attempts(request) == [1, 2]
        assert len(c.tokens(request)) == 200
        await eventually(c.at_rest)
        assert await c.ledger() == {request: 1}


async def test_a_draining_worker_announces_no_room_and_takes_nothing(nats_url: str) -> None:
    """What reaches the pool meanwhile waits for another worker, without using up deliveries."""
    beats: list[Beat] = []

    async def on_beat(msg: Msg) -> None:
        beats.append(Beat.unpack(msg.data))

    async with client(nats_url, **SLOW) as c:
        await c.broker.subscribe(subjects.fleet_of("mock"), on_beat)
        async with running(gpu_worker.service, a_worker(nats_url, id="leaving")) as stop:
            await eventually(lambda: beats)
            runs = await c.dispatch(c.envelope(5, 16), PAYLOAD)
            await eventually(lambda: runs in c.records)
            stop.set()
            await eventually(lambda: beats[-1].draining)
            assert (beats[-1].free_sequences, beats[-1].free_tokens) == (0, 0)
            requests = [await c.dispatch(c.envelope(5, 16), PAYLOAD) for _ in range(20)]
            await eventually(lambda: c.terminal(runs))
        async with running(gpu_worker.service, a_worker(nats_url, id="stays")):
            await eventually(lambda: all(c.terminal(request) for request in requests))
        assert {c.records[request][0]["worker"] for request in requests} == {"stays"}

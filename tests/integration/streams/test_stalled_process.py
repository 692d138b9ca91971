"""A process that stood still reads what has come before it takes the broker for silent.

Each test blocks the event loop on purpose, for longer than the time-out that it is about, while the
answer arrives.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from gpu_worker.identity import WorkerIdentity
from gpu_worker.pool.pull_loops import PullLoops
from streams import topology
from streams.broker import broker_client, declaration
from streams.broker.broker_client import STORE_SECONDS, Broker
from streams.broker.pull_loop import Delivery, pull_one
from streams.subjects import PoolKey, Priority
from tests.support.accounts_server import connect
from tests.support.blocked_loop import block_loop
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer

DEAD = "infer.dead.acme.m"
STALL_SECONDS = 0.5  # longer than the time-out
CONSUMER = topology.work_consumer(PoolKey("m", "1", Priority.BATCH), 3.0)

Ask = Callable[[Broker], Awaitable[Any]]


async def ask_and_stall(server: NatsServer, ask: Ask, timeout: float) -> Any:
    """The answer to `ask`, whose process stands still from when it has asked until it is answered.

    The server is frozen meanwhile, so that it does not answer before that.
    """
    async with connect(server.url, "test") as broker:
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        await declaration.declare_consumer(broker, topology.WORK, CONSUMER)
        await broker.store(DEAD, b"stored")
        server.freeze()
        asking = asyncio.ensure_future(ask(broker))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not asking.done()
        server.thaw()
        block_loop(timeout + STALL_SECONDS)
        return await asking


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    ("timeout", "ask"),
    [
        pytest.param(STORE_SECONDS, lambda broker: broker.store(DEAD, b"x"), id="append"),
        pytest.param(
            1.0, lambda broker: broker.read(topology.DEAD, {"last_by_subj": DEAD}), id="read"
        ),
        pytest.param(
            1.0, lambda broker: broker.client.request("$JS.API.INFO", timeout=1.0), id="request"
        ),
        pytest.param(
            1.0,
            lambda broker: declaration.declare_consumer(broker, topology.WORK, CONSUMER, 1.0),
            id="declaration",
        ),
        pytest.param(
            1.0,
            lambda broker: pull_one(broker, topology.WORK, CONSUMER.durable_name or ""),
            id="pull",
        ),
        pytest.param(1.0, lambda broker: broker.client.flush(1.0), id="flush"),
    ],
)
def test_answers_that_came_meanwhile_count(
    nats_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    timeout: float,
    ask: Ask,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """They lie in the socket; a time-out by the clock is over before they are read."""
    monkeypatch.setattr(broker_client, "_READ_SECONDS", (1.0,))
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(ask_and_stall(nats_server, ask, timeout))


async def test_a_worker_waits_for_a_broker_that_does_not_answer_when_it_starts(
    nats_server: NatsServer,
) -> None:
    """It would end, and its supervisor would have to load the model anew."""

    def ignore(_: Delivery) -> None:
        return

    async with connect(nats_server.url, "test") as broker, asyncio.TaskGroup() as tasks:
        await declaration.declare(broker, topology.Scale(), max_queued=10)
        pulls = PullLoops(broker, WorkerIdentity("m", "1", "w", 1), lambda _: 1, ignore)
        nats_server.freeze()
        starting = tasks.create_task(pulls.start(tasks, 3.0))
        await eventually(lambda: not broker.is_connected)  # longer than a declaration's time-out
        assert not starting.done()
        nats_server.thaw()
        await starting
        await pulls.stop()


async def test_a_request_that_is_given_up_leaves_no_subscription(shared_nats_url: str) -> None:
    """Else each pull that a broker does not answer would leave one for ever."""
    async with connect(shared_nats_url, "test") as broker:
        before = len(broker.client._subs)
        asking = broker.client.request("nobody.hears", timeout=0.05, old_style=True)
        await broker.client.subscribe("nobody.hears")
        with pytest.raises(TimeoutError):
            await asking
        assert len(broker.client._subs) == before + 1

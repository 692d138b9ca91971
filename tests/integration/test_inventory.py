"""What is in WORK, and what the leader believes to be there."""

from collections import Counter
from typing import Any

import pytest

import dispatcher.service
import gpu_worker.service
from dispatcher import inventory, leader
from dispatcher.inventory import Inventory
from streams import topology
from streams.connection import Broker, StoredMessage
from tests.eventually import eventually
from tests.integration.services import Client, a_dispatcher, a_worker, client, running

LONG = {"ttft_ms": 1, "itl_ms": 5, "sequences": 1}


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds between two looks are of no use here."""
    monkeypatch.setattr(leader, "AUDIT_SECONDS", 0.2)


async def one_runs_and_two_wait(c: Client) -> tuple[str, list[str]]:
    """All of them in WORK, at a worker with one place."""
    runs = await c.send(max_tokens=1500)
    await eventually(lambda: c.kinds(runs)["chunk"])
    waiting = [await c.send() for _ in range(2)]

    async def lie_there() -> bool:
        return await c.held(topology.WORK) == 3

    await eventually(lie_there)
    return runs, waiting


async def test_what_nobody_had_pulled_when_it_was_purged_ends_soon(nats_url: str) -> None:
    """Its client would wait until the deadline; what runs has no need of its work."""
    async with (
        client(nats_url, **LONG) as c,
        running(dispatcher.service, a_dispatcher(nats_url)),
        running(gpu_worker.service, a_worker(nats_url)),
    ):
        runs, waiting = await one_runs_and_two_wait(c)
        await c.broker.js.purge_stream(topology.WORK)
        await eventually(lambda: all(c.terminal(request) for request in waiting))
        assert [c.records[request][-1]["code"] for request in waiting] == ["work_lost"] * 2
        await c.cancel(runs)
        assert (await eventually(lambda: c.terminal(runs)))["type"] == "done"
        assert await c.ledger() == dict.fromkeys([runs, *waiting], 1)
        after = await c.send()
        assert (await eventually(lambda: c.terminal(after)))["type"] == "done"


async def test_what_runs_and_waits_in_order_is_not_read_again_and_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payloads of a large fleet every two seconds would be most of what its broker sends."""
    counted: Counter[str] = Counter()
    read, look = Broker.read_subject, Inventory.look

    async def reading(self: Broker, stream: str, *words: Any) -> list[StoredMessage]:
        counted[stream] += 1
        return await read(self, stream, *words)

    async def looking(self: Inventory) -> None:
        await look(self)
        counted["looks"] += 1

    monkeypatch.setattr(Broker, "read_subject", reading)
    monkeypatch.setattr(Inventory, "look", looking)
    monkeypatch.setattr(inventory, "TOLD_SECONDS", 1.0)
    async with (
        client(nats_url, **LONG) as c,
        running(dispatcher.service, a_dispatcher(nats_url)),
        running(gpu_worker.service, a_worker(nats_url)),
    ):
        runs, _ = await one_runs_and_two_wait(c)
        counted.clear()
        await eventually(lambda: counted["looks"] > 15)
        assert counted[topology.WORK] < 5  # none, on a machine that beats in time
        await c.cancel(runs)
        await eventually(c.at_rest)

"""Workers that come and go leave no consumers behind."""

from pathlib import Path

import pytest

import dispatcher.service
import gpu_worker.service
from dispatcher import model_dispatcher
from streams import topology
from tests.support.eventually import eventually
from tests.support.service_process import service_process
from tests.support.services import (
    BrokerClient,
    broker_client,
    dispatcher_settings,
    running,
    worker_settings,
)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds between two looks are of no use here."""
    monkeypatch.setattr(model_dispatcher, "RECONCILE_SECONDS", 0.2)


async def own_consumers(c: BrokerClient) -> list[str]:
    """Names of the consumers of single workers."""
    found = await c.broker.js.consumers_info(topology.WORK)
    return [info.name for info in found if info.name.startswith("worker_")]


async def is_served(c: BrokerClient) -> bool:
    report = await c.report()
    return bool(report and report["workers"])


async def test_a_drained_workers_consumer_goes_with_it(nats_url: str) -> None:
    """The pool's own stay: the next worker pulls from them."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        async with running(gpu_worker.service, worker_settings(nats_url)):
            await eventually(lambda: is_served(c))
            assert len(await own_consumers(c)) == 1

        async def is_gone() -> bool:
            return not await own_consumers(c)

        await eventually(is_gone)
        assert await c.broker.js.consumers_info(topology.WORK)


async def test_a_dead_workers_consumer_goes_once_no_work_lies_there(
    nats_url: str, tmp_path: Path
) -> None:
    """What it held is served by another one first."""
    async with (
        broker_client(nats_url) as c,
        running(dispatcher.service, dispatcher_settings(nats_url)),
    ):
        log = tmp_path / "worker.log"
        with service_process("worker", nats_url, log, model="mock") as doomed:
            await eventually(lambda: is_served(c))
            (consumer,) = await own_consumers(c)
            request = await c.send("hello", max_tokens=200)
            await eventually(lambda: c.records.get(request))
            doomed.kill()
        async with running(gpu_worker.service, worker_settings(nats_url)):
            await eventually(lambda: c.records[request][-1]["type"] == "done")

            async def is_gone() -> bool:
                return consumer not in await own_consumers(c)

            await eventually(is_gone)
            assert len(await own_consumers(c)) == 1

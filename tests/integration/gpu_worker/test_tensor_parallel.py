"""`millstream worker --tensor-parallel-size 2`: one command, two processes, one life."""

from pathlib import Path

import psutil
import pytest

import dispatcher.service
from registry.model_inspection import model_from
from registry.store import Registry
from tests.integration.gpu_worker.test_adapters import Cell, save_model
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import gateways
from tests.support.service_process import service_process
from tests.support.services import always, dispatcher_settings, running


@pytest.mark.timeout(400)  # both processes import all of transformers
async def test_a_worker_of_two_ranks_serves_and_ends_when_one_is_killed(
    nats_url: str, tmp_path: Path
) -> None:
    """Its text is that of one rank; without a rank it leaves the stage to its supervisor."""
    model = model_from(save_model(tmp_path / "base"), "base", "v1")
    async with connect(nats_url, "test") as broker:
        registry = await Registry.open(broker, declares=always)
        await registry.add_model(model)
        await registry.close()
    settings = {"model": "base", "kv_tokens": 2048, "tensor_parallel_size": 2}
    with service_process("worker", nats_url, tmp_path / "log", **settings) as worker:
        async with (
            gateways(nats_url) as (gateway,),
            running(dispatcher.service, dispatcher_settings(nats_url)),
        ):
            await eventually(gateway.is_ready, seconds=200)
            cell = Cell(gateway, nats_url, {})
            assert await cell.text("base") == cell.expected()
            (follower,) = psutil.Process(worker.process.pid).children()
            follower.kill()
            await eventually(lambda: worker.process.poll() is not None)
            assert worker.process.returncode != 0
            assert worker.has_logged("rank_lost")

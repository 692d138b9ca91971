"""Room for results: what is not known to fit is not accepted."""

import asyncio

import pytest

from api.submission.response_space import ResponseSpace
from streams import job_subjects, topology
from streams.broker import declaration
from streams.errors import StorageFull
from streams.records.jobs.batch_store import BatchStore
from streams.topology import Scale
from tests.support.accounts_server import connect
from tests.support.eventually import eventually


async def test_a_full_stream_of_results_refuses_until_it_has_room(nats_url: str) -> None:
    """The last tenth is for what was accepted: a result without room would keep a request open."""
    async with connect(nats_url, "test") as broker:
        await declaration.declare(broker, Scale(), 100)
        info = await broker.js.stream_info(topology.RESULTS)
        await broker.js.update_stream(info.config, max_bytes=20_000)
        space = ResponseSpace(broker, BatchStore(broker))
        space.check()
        looking = asyncio.create_task(space.run())
        await broker.store(job_subjects.result("acme", "a", 0), bytes(18_500))
        await eventually(lambda: space.used_ratio > 0.9)
        with pytest.raises(StorageFull):
            space.check()
        await broker.purge(topology.RESULTS, job_subjects.results_of("acme", "a"), 0)
        await eventually(lambda: space.used_ratio < 0.1)
        space.check()
        looking.cancel()

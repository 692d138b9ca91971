"""A batch while its services die: no line is lost, doubled or out of order."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import dispatcher.service
from streams import subjects, topology
from streams.broker.broker_client import Broker
from streams.messages import LedgerRecord
from tests.integration.jobs.test_batches import chat_line, ended, lines_of, sdk, submit
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import gateways, register
from tests.support.service_process import ServiceProcess, service_process, worker_process
from tests.support.services import dispatcher_settings, running

LINES = 1000


async def test_a_batch_survives_the_death_of_jobs_services_and_workers(
    nats_url: str, tmp_path: Path
) -> None:
    """Each is killed in turn, twice; every line is answered and billed once."""
    await register(nats_url, ttft_ms=1, itl_ms=1)
    async with (
        gateways(nats_url) as (gateway,),
        running(dispatcher.service, dispatcher_settings(nats_url)),
        sdk(gateway) as client,
        connect(nats_url, "test") as broker,
        AsyncExitStack() as stack,
    ):

        def start(kind: str, number: int) -> ServiceProcess:
            log = tmp_path / f"{kind}-{number}.log"
            if kind == "worker":
                return stack.enter_context(worker_process(nats_url, log, id=f"worker-{number}"))
            return stack.enter_context(
                service_process("jobs", nats_url, log, id=f"jobs-{number}", batch_window=32)
            )

        running_now = {kind: start(kind, 0) for kind in ("jobs", "worker")}
        batch = await submit(client, [chat_line(i, max_tokens=16) for i in range(LINES)])
        for number in range(1, 3):
            for kind in ("jobs", "worker"):
                wanted = LINES * (2 * number - 1 - (kind == "jobs")) // 6
                await eventually(partial(_has_counted, broker, wanted))
                running_now[kind].kill()
                running_now[kind] = start(kind, number)
        batch = await ended(client, batch)
        assert batch.status == "completed"
        output = await lines_of(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [f"id-{i}" for i in range(LINES)]
        await eventually(lambda: _billed_once(broker))


async def _has_counted(broker: Broker, wanted: int) -> bool:
    info = await broker.js.stream_info(topology.RESULTS)
    return info.state.messages >= wanted


async def _billed_once(broker: Broker) -> bool:
    found = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
    records = [LedgerRecord.unpack(message.data) for message in found]
    done = [record.request_id for record in records if record.outcome in ("stop", "length")]
    assert len(done) == len(set(done))
    await asyncio.sleep(0)
    return len(done) == LINES

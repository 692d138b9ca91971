"""The broker restarts alone and forgets what it had in memory: everything ends all the same."""

import dispatcher.service
import gpu_worker.service
from tests.broker import NatsServer
from tests.eventually import eventually
from tests.integration.services import a_dispatcher, a_worker, client, running

SLOW = {"ttft_ms": 5, "itl_ms": 10, "sequences": 8}


async def test_what_runs_and_what_waits_ends_once(nats_server: NatsServer) -> None:
    """Token logs, leases and credit are gone; requests, work and the ledger are on disk."""
    url = nats_server.url
    async with (
        client(url, **SLOW) as c,
        running(dispatcher.service, a_dispatcher(url)),
        running(gpu_worker.service, a_worker(url, beat_seconds=0.2, ack_wait_seconds=1)),
    ):
        requests = [await c.send(f"prompt {i}", max_tokens=80) for i in range(24)]
        await eventually(lambda: sum(len(records) > 3 for records in c.records.values()) >= 8)
        nats_server.restart()
        await eventually(lambda: all(c.terminal(r) for r in requests), seconds=40)
        await eventually(c.at_rest, seconds=20)
        for request in requests:
            log = await c.log(request)
            assert [r["type"] for r in log.records].count("done") == 1
            assert len(log.tokens) == 80
            assert log.attempts >= 1
        assert await c.ledger() == dict.fromkeys(requests, 1)
        again = await c.send("prompt 0", max_tokens=80)
        await eventually(lambda: c.terminal(again))
        assert (await c.log(requests[0])).tokens == c.tokens(again)

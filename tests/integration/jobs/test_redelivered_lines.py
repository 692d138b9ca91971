"""Lines whose work comes to a worker again, when their logs are removed behind their results."""

from typing import Any

import pytest

from dispatcher.reconcile.requeuer import build_requeue_id
from gpu_worker.attempt.attempt import Attempt
from streams import topology
from streams.broker.pull_loop import Delivery
from streams.headers import MESSAGE_ID
from tests.integration.jobs.test_batches import chat_line, ended, jobs_cell, submit
from tests.support.accounts_server import connect
from tests.support.eventually import eventually


async def test_a_requeued_line_that_has_its_result_is_not_computed_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of a requeued line is a new one to the broker: it counts as delivered once."""
    served: list[Delivery] = []
    add = Attempt._add_to_engine

    def note(self: Attempt, before: Any) -> None:
        served.append(self.delivery)
        add(self, before)

    monkeypatch.setattr(Attempt, "_add_to_engine", note)
    async with jobs_cell(nats_url) as client, connect(nats_url, "test") as broker:
        await ended(client, await submit(client, [chat_line(0)]))
        (work,) = served

        async def is_done() -> bool:
            return not (await broker.js.stream_info(topology.WORK)).state.messages

        await eventually(is_done)
        again = build_requeue_id(work.headers[MESSAGE_ID], work.seq)
        await broker.store(work.subject, work.data, {**work.headers, MESSAGE_ID: again})
        await eventually(is_done)
        assert len(served) == 1

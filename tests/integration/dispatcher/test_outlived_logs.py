"""Requests whose token logs are gone when the dispatcher ends them, but not how they ended."""

from dataclasses import replace
from typing import Any

import pytest

from dispatcher.dispatching.terminals import write_terminal
from streams import messages, topology
from streams.broker.declaration import declare_stream
from streams.headers import AnswerRef, Envelope, ItemRef
from streams.messages import LedgerRecord
from streams.records.stored_ends import stored_end_of
from streams.topology import Scale
from tests.support.services import BrokerClient, broker_client

USAGE = messages.openai_usage(5, 3)
DONE = messages.done_record("stop", USAGE, {})


def of_two_attempts(accepted: int) -> list[bytes]:
    """The records of a log whose first worker died behind its first output."""
    records: list[dict[str, Any]] = [
        messages.started_record("mock", "1", 1, "w1"),
        {"type": "chunk", "index": 0, "count": 1, "characters": 0, "text": "a", "at": accepted + 7},
        messages.started_record("mock", "1", 2, "w2", accepted + 7),
        {"type": "chunk", "index": 1, "count": 2, "characters": 1, "text": "bc"},
    ]
    return [messages.pack_record(record, "msgpack") for record in records]


async def ended_twice(c: BrokerClient, envelope: Envelope) -> LedgerRecord:
    """The ledger record of a request that its worker has ended, up to the log, which is gone."""
    stored = stored_end_of(c.broker, envelope)
    assert stored
    assert await stored.store_result(of_two_attempts(envelope.accepted), DONE) == DONE
    await write_terminal(c.broker, envelope, "mock", "deadline_exceeded", "too late", 1)
    (record,) = await c.ledger()
    return record


@pytest.mark.parametrize("wish", ["item", "answer"])
async def test_a_request_is_billed_as_it_ran(nats_url: str, wish: str) -> None:
    """The judge of versions, and who looks for lost workers, read attempts there."""
    refs: dict[str, Any] = {
        "item": ItemRef("batch_1", 0, 1, is_last=True),
        "answer": AnswerRef("a", "digest"),
    }
    async with broker_client(nats_url) as c:
        await declare_stream(c.broker, topology.answers_stream("acme"), Scale())
        envelope = replace(c.envelope(5, 8), **{wish: refs[wish]})
        record = await ended_twice(c, envelope)
        assert (record.outcome, record.completion_tokens) == ("stop", 3)
        assert (record.attempts, record.version) == (2, "1")
        assert record.first == envelope.accepted + 7

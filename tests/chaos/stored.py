"""What the brokers hold at the end of a run: token logs, ledger, queues."""

import itertools
from collections.abc import Iterator
from functools import partial

from streams import messages, subjects, topology
from streams.connection import Broker, StoredMessage
from streams.messages import LedgerRecord
from streams.patience import persistently_for
from streams.token_log import contents
from tests.chaos.history import Billed, Event, Left, Logged

PATIENCE_SECONDS = 120.0


async def everything(broker: Broker, shards: int) -> list[Event]:
    """Everything, read once."""
    events: list[Event] = []
    for shard in range(shards):
        stream = topology.tokens(shard)
        events += _logs(await _all(broker, stream, "infer.token.>"))
    ledger = await _all(broker, topology.LEDGER, "infer.ledger.>")
    events += [_bill(message) for message in ledger]
    for stream in (topology.REQUESTS, topology.WORK):
        events.append(Left(stream, await held(broker, stream)))
    return events


async def _all(broker: Broker, stream: str, subject: str) -> list[StoredMessage]:
    """Of a busy machine's broker: an hour's logs take it long to search."""
    return await persistently_for(PATIENCE_SECONDS, partial(broker.read_subject, stream, subject))


async def held(broker: Broker, stream: str) -> int:
    """How many messages a stream holds."""
    info = await broker.js.stream_info(stream)
    return int(info.state.messages)


def _logs(found: list[StoredMessage]) -> Iterator[Logged]:
    def subject(message: StoredMessage) -> str:
        return message.subject

    for name, group in itertools.groupby(sorted(found, key=subject), subject):
        yield _log(name, list(group))


def _log(subject: str, found: list[StoredMessage]) -> Logged:
    address, log = subjects.parse_log(subject), contents(found)
    chunks = [(r["index"], r["count"], r["text"]) for r in log.records if r["type"] == "chunk"]
    ends = [r for r in log.records if r["type"] in messages.TERMINALS]
    outcomes = [end.get("finish_reason") or end["code"] for end in ends]
    return Logged(address.request_id, address.tenant, chunks, outcomes, log.attempts)


def _bill(message: StoredMessage) -> Billed:
    record = messages.known(LedgerRecord, messages.unpack(message.data))
    tenant = message.subject.split(".")[2]
    assert tenant == record.tenant
    return Billed(record.request_id, tenant, record.completion_tokens, record.outcome)

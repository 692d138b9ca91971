"""What the brokers hold at the end of a run: token logs, ledger, queues."""

import itertools
from collections.abc import Iterator
from functools import partial

from api.batch_bodies import batch_id
from streams import job_subjects, messages, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage
from streams.broker.retry import retry_for
from streams.messages import LedgerRecord
from streams.records.jobs.batch_records import Batch
from streams.records.jobs.item_results import make_request_id
from streams.records.token_log import decode_contents
from tests.chaos.history import BatchTries, Event, LedgerEntry, QueueDepth, StoredLog
from tests.chaos.plan import TENANTS

PATIENCE_SECONDS = 120.0
MOST_TRIES = 20
INGRESS = tuple(map(topology.ingress_stream_name, TENANTS))
QUEUES = (topology.REQUESTS, topology.WORK, *INGRESS)


async def read_stored_events(broker: Broker, shards: int) -> list[Event]:
    """Everything, read once."""
    events: list[Event] = []
    for shard in range(shards):
        stream = topology.token_stream_name(shard)
        events += _logs(await _all(broker, stream, "infer.token.>"))
    ledger = await _all(broker, topology.LEDGER, "infer.ledger.>")
    events += [_bill(message) for message in ledger]
    events += await _batches(broker)
    return [*events, *[QueueDepth(each, await message_count(broker, each)) for each in QUEUES]]


async def _batches(broker: Broker) -> list[BatchTries]:
    found = await _all(broker, topology.BATCHES, job_subjects.ALL_BATCH_RECORDS)
    newest = {message.subject: Batch.unpack(message.data, message.seq) for message in found}
    return [BatchTries(batch_id(batch), _tries(batch)) for batch in newest.values()]


def _tries(batch: Batch) -> list[list[str]]:
    """Ids by line; a line has few tries that began, and any number that never did."""
    numbers = range(1, MOST_TRIES + 1)
    return [[make_request_id(batch.secret, i, n) for n in numbers] for i in range(batch.total)]


async def _all(broker: Broker, stream: str, subject: str) -> list[StoredMessage]:
    """Of a busy machine's broker: an hour's logs take it long to search."""
    return await retry_for(PATIENCE_SECONDS, partial(broker.read_subject, stream, subject))


async def message_count(broker: Broker, stream: str) -> int:
    """How many messages a stream holds."""
    info = await broker.js.stream_info(stream)
    return int(info.state.messages)


def _logs(found: list[StoredMessage]) -> Iterator[StoredLog]:
    def subject(message: StoredMessage) -> str:
        return message.subject

    for name, group in itertools.groupby(sorted(found, key=subject), subject):
        yield _log(name, list(group))


def _log(subject: str, found: list[StoredMessage]) -> StoredLog:
    address, log = subjects.parse_log(subject), decode_contents(found)
    chunks = [(r["index"], r["count"], r["text"]) for r in log.records if r["type"] == "chunk"]
    ends = [r for r in log.records if r["type"] in messages.TERMINAL_TYPES]
    outcomes = [end.get("finish_reason") or end["code"] for end in ends]
    return StoredLog(
        address.request_id, address.tenant, chunks, outcomes, log.attempts, address.route
    )


def _bill(message: StoredMessage) -> LedgerEntry:
    record = messages.from_wire(LedgerRecord, messages.unpack(message.data))
    tenant = message.subject.split(".")[2]
    assert tenant == record.tenant
    return LedgerEntry(record.request_id, tenant, record.completion_tokens, record.outcome)

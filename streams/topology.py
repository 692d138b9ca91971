"""Configuration of all streams and consumers as data; `millstream admin` declares the streams."""

import hashlib
from dataclasses import dataclass, field

from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RePublish,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from streams import job_subjects, subjects
from streams.subjects import PoolKey

REQUESTS, WORK, LEDGER, DEAD = "REQUESTS", "WORK", "LEDGER", "DEAD"
ATTEMPTS, REPLAYS = "ATTEMPTS", "REPLAYS"
CHECKPOINTS, ROLLUPS = "CHECKPOINTS", "ROLLUPS"
USAGE, RATES = "USAGE", "RATES"
THRESHOLDS, RESERVATIONS = "THRESHOLDS", "RESERVATIONS"
SIGNALS, AUDIT = "SIGNALS", "AUDIT"
FILES, FILE_RECORDS = "FILES", "KV_files"
RESULTS, BATCHES = "RESULTS", "KV_batches"
RESPONSES = "KV_responses"
WEBHOOKS = "WEBHOOKS"
WEBHOOK_ENDPOINTS, DELIVERIES = "KV_webhooks", "KV_deliveries"
FLEET, CURVES = "KV_fleet", "KV_curves"
IDEMPOTENCY_BUCKET = "idempotency"
# Its leader tells everybody the time. Whoever may ask for a stream's state may have the subjects in
# it, too: those of this one name models and workers, and no tenants.
CLOCK = WORK
MAX_DEADLINE_SECONDS = 600
# A token log outlives its request: the longest deadline, and then time to resume reading.
LOG_SECONDS = MAX_DEADLINE_SECONDS + 300
# A safety net: workers give a request up sooner (streams/records/attempt_history.py), where drains
# and hand-overs do not count.
MAX_DELIVERIES = 20
SIGNAL_SECONDS = 10.0  # nobody reads a signal later: it was heard when it was stored
MAX_SIGNAL_BYTES = 1024  # with headers; a drain order has some 20
RATE_SECONDS = 300  # counters of a minute or a quota slot are read during it and the next one
IDLE_CONSUMER_SECONDS = 3600.0
DAY_SECONDS = 86400
MONTH_SECONDS = 30 * DAY_SECONDS
USAGE_SECONDS = 40 * DAY_SECONDS  # a month's counter may change on its first day alone
ROLLUP_SECONDS = 400 * DAY_SECONDS
MIB = 2**20
FILES_BYTES = 2048 * MIB
FILE_RECORDS_BYTES = 64 * MIB
RESULTS_BYTES = 2048 * MIB
FLEET_BYTES = 16 * MIB  # three records
CURVES_BYTES = 32 * MIB
CURVES_HISTORY = 8  # of each: older ones tell what has changed
RESPONSES_BYTES = 1024 * MIB
ITEM_LOGS_BYTES = 128 * MIB  # of lines under way: what has its result is removed
WEBHOOKS_BYTES = 128 * MIB  # some 300,000 events
# Deliveries are tried for three days, and the events are there a while longer
WEBHOOKS_SECONDS = 7 * DAY_SECONDS
WEBHOOK_ENDPOINTS_BYTES = 16 * MIB
DELIVERIES_BYTES = 256 * MIB
SIGNALS_BYTES = MIB  # a full stream drops its oldest signals, which were heard long before
_INGRESS = "INGRESS_"
INGRESS_CONSUMER = "gateways"
# Reserved in the broker's store for each tenant that publishes: four of the largest submissions
INGRESS_BYTES = 4 * MIB
ANSWERS = "ANSWERS_"
ANSWERS_BYTES = 32 * MIB  # of one tenant; a full stream drops its oldest answers
ANSWERS_SECONDS = 7 * DAY_SECONDS
# Of escaped names in a consumer's name, which has at most 255 characters: the rest is a word and a
# worker's name or a priority
_MAX_NAMED = 180
# Seconds; 0 would mean two minutes. For streams to which strangers publish: the broker drops a
# message whose `Nats-Msg-Id` came before, without a word.
_LEAST_DUPLICATE_WINDOW = 0.1


@dataclass(frozen=True)
class Scale:
    """Size of an installation: copies of each stream, and streams over which token logs are spread.

    A laptop has one of each.
    """

    replicas: int = 1
    shards: int = 1


@dataclass(frozen=True)
class LedgerLimits:
    """Limits of the ledger in size and age; a full ledger stores nothing more.

    `max_age_seconds` 0 means that records never expire: whoever exports them removes them.
    """

    max_bytes: int = 256 * MIB
    max_age_seconds: float = MONTH_SECONDS


DEFAULT_AUDIT_BYTES = 64 * MIB


@dataclass(frozen=True)
class StreamLimits:
    """Limits that operators set: of the ledger, and of other streams in bytes.

    Those of the audit log, of all tenants' files, and of all results of batches.
    """

    ledger: LedgerLimits = field(default_factory=LedgerLimits)
    audit_bytes: int = DEFAULT_AUDIT_BYTES
    files_bytes: int = FILES_BYTES
    results_bytes: int = RESULTS_BYTES


DEFAULT_LIMITS = StreamLimits()


def token_stream_name(shard: int | str) -> str:
    """Return the name of the token log stream with the number or name `shard`."""
    return f"TOKENS_{shard}"


def token_stream_of(request_id: str, shards: int) -> str:
    """Return the name of the stream that holds a request's token log, of `shards` such streams."""
    return token_stream_name(subjects.shard(request_id, shards))


def ingress_stream_name(tenant: str) -> str:
    """Return the name of the stream on which a tenant's producers publish."""
    return f"{_INGRESS}{subjects.token(tenant)}"


def answers_stream_name(tenant: str) -> str:
    """Return the name of the stream with the durable answers to a tenant's producers."""
    return f"{ANSWERS}{subjects.token(tenant)}"


def tenant_of_answers(stream: str) -> str | None:
    """Return the tenant of a stream of durable answers, by its name; None for any other stream."""
    return stream.removeprefix(ANSWERS) if stream.startswith(ANSWERS) else None


def tenant_of_ingress(stream: str) -> str | None:
    """Return the tenant of an ingress stream, by its name; None for any other stream."""
    return stream.removeprefix(_INGRESS) if stream.startswith(_INGRESS) else None


def is_of_tenant(stream: str) -> bool:
    """Return whether a stream is one of a single tenant that publishes, by its name."""
    return (tenant_of_ingress(stream) or tenant_of_answers(stream)) is not None


def stream_configs(
    scale: Scale,
    max_queued: int,
    limits: StreamLimits = DEFAULT_LIMITS,
) -> list[StreamConfig]:
    """Return the configurations of all streams except the ingress streams (one for each tenant).

    `max_queued` is the most requests that any lane (one tenant's queue for a model and priority)
    may hold; a lower limit of a tenant is enforced by the gateways. `limits` are
    those that operators set.
    """
    return [
        _requests(max_queued),
        _queue(WORK, "infer.work.*.*.*.*", 256 * MIB),
        *(_token_log(str(shard), 512 * MIB // scale.shards) for shard in range(scale.shards)),
        _token_log(subjects.ITEM_SHARD, ITEM_LOGS_BYTES),
        _ledger(limits.ledger),
        audit_stream(limits.audit_bytes),
        _records(DEAD, "infer.dead.*.*", 64 * MIB, MONTH_SECONDS),
        _records(REPLAYS, subjects.ALL_REPLAYS, 16 * MIB, MONTH_SECONDS),
        _attempts(),
        _checkpoints(),
        _signals(),
        _rollups(),
        _counters(USAGE, "infer.usage.*.*.*.*", USAGE_SECONDS, StorageType.FILE),
        _records(THRESHOLDS, "infer.threshold.*.*.*.*.*", 16 * MIB, USAGE_SECONDS),
        _reservations(),
        _counters(RATES, "infer.rate.*.*.*.*", RATE_SECONDS, StorageType.MEMORY),
        _idempotency_bucket(),
        _replaceable(FILES, job_subjects.ALL_FILES, limits.files_bytes),
        _replaceable(FILE_RECORDS, job_subjects.ALL_FILE_RECORDS, FILE_RECORDS_BYTES),
        _replaceable(BATCHES, job_subjects.ALL_BATCH_RECORDS, FILE_RECORDS_BYTES),
        _results(limits.results_bytes),
        _responses(),
        _records(WEBHOOKS, job_subjects.ALL_EVENTS, WEBHOOKS_BYTES, WEBHOOKS_SECONDS),
        _webhook_endpoints(),
        _deliveries(),
        _fleet(),
        _curves(),
    ]


def stream_names(shards: int) -> list[str]:
    """Return the names of the streams of `stream_configs`, with so many streams of token logs."""
    return [config.name or "" for config in stream_configs(Scale(shards=shards), 1)]


def _queue(name: str, subject: str, max_bytes: int) -> StreamConfig:
    """Configure a work queue: each message is consumed once; a full stream refuses new ones."""
    return StreamConfig(
        name=name,
        subjects=[subject],
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        max_bytes=max_bytes,
        duplicate_window=LOG_SECONDS,
        storage=StorageType.FILE,
        allow_direct=True,
    )


def _records(name: str, subject: str, max_bytes: int, max_age: float) -> StreamConfig:
    """Configure a store of records kept for `max_age` seconds; a full stream drops the oldest."""
    return StreamConfig(
        name=name,
        subjects=[subject],
        max_bytes=max_bytes,
        max_age=max_age,
        storage=StorageType.FILE,
        allow_direct=True,
    )


def _replaceable(name: str, subject: str, max_bytes: int) -> StreamConfig:
    """Configure a store of one message for each subject, kept until it is removed.

    A message replaces the one before; a full stream refuses new ones.
    """
    return StreamConfig(
        name=name,
        subjects=[subject],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_bytes=max_bytes,
        duplicate_window=_LEAST_DUPLICATE_WINDOW,
        storage=StorageType.FILE,
        allow_direct=True,
    )


def _fleet() -> StreamConfig:
    """Configure the bucket `fleet`; the broker copies its records to listeners of any account."""
    config = _replaceable(FLEET, "$KV.fleet.>", FLEET_BYTES)
    config.republish = RePublish(src="$KV.fleet.>", dest=f"{subjects.PREFIX}.changed.fleet.>")
    return config


def _curves() -> StreamConfig:
    """Configure the bucket `curves`; of each curve the last ones are kept."""
    config = _replaceable(CURVES, subjects.ALL_CURVES, CURVES_BYTES)
    config.max_msgs_per_subject = CURVES_HISTORY
    return config


def _webhook_endpoints() -> StreamConfig:
    """Configure the bucket `webhooks`, which has the cursor of the fan-out of events, too."""
    config = _replaceable(
        WEBHOOK_ENDPOINTS, job_subjects.ALL_WEBHOOK_ENDPOINTS, WEBHOOK_ENDPOINTS_BYTES
    )
    config.subjects = [job_subjects.ALL_WEBHOOK_ENDPOINTS, job_subjects.EVENT_CURSOR]
    return config


def _deliveries() -> StreamConfig:
    """Configure the bucket `deliveries`: a record expires a week after its last change."""
    config = _replaceable(DELIVERIES, job_subjects.ALL_DELIVERIES, DELIVERIES_BYTES)
    config.max_age = WEBHOOKS_SECONDS
    return config


def _results(max_bytes: int) -> StreamConfig:
    """Configure the stream RESULTS: one message for each line of a job, never replaced or dropped.

    The broker tells listeners of each, without what it holds.
    """
    config = _records(RESULTS, job_subjects.ALL_RESULTS, max_bytes, MONTH_SECONDS)
    config.discard = DiscardPolicy.NEW
    config.duplicate_window = _LEAST_DUPLICATE_WINDOW
    config.republish = RePublish(
        src=f"{subjects.PREFIX}.result.*.*.>",
        dest=f"{subjects.PREFIX}.resulted.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}.>",
        headers_only=True,
    )
    return config


def _responses() -> StreamConfig:
    """Configure the bucket `responses`: records, and notes that a response needs work."""
    config = _replaceable(RESPONSES, job_subjects.ALL_RESPONSE_RECORDS, RESPONSES_BYTES)
    config.subjects = [job_subjects.ALL_RESPONSE_RECORDS, job_subjects.ALL_PENDING_RESPONSES]
    config.max_age = MONTH_SECONDS
    return config


def _requests(max_queued: int) -> StreamConfig:
    config = _queue(REQUESTS, "infer.request.*.*.*", 1024 * MIB)
    config.discard_new_per_subject, config.max_msgs_per_subject = True, max_queued
    return config


def _ledger(limits: LedgerLimits) -> StreamConfig:
    """Configure the ledger: what is billed is never dropped for want of room.

    The broker copies its records to listeners of any account.
    """
    config = _records(LEDGER, "infer.ledger.*.*", limits.max_bytes, limits.max_age_seconds)
    config.subjects = ["infer.ledger.*.*", "infer.outcome.*.*", "infer.worker_time.*.*"]
    config.discard = DiscardPolicy.NEW
    config.duplicate_window = LOG_SECONDS
    config.republish = RePublish(
        src="infer.ledger.*.*", dest="infer.billed.{{wildcard(1)}}.{{wildcard(2)}}"
    )
    return config


def audit_stream(max_bytes: int) -> StreamConfig:
    """Return the configuration of the audit log: nobody may delete a record, and none expires."""
    config = _records(AUDIT, subjects.ALL_AUDIT, max_bytes, 0)
    config.discard = DiscardPolicy.NEW
    config.deny_delete = config.deny_purge = True
    return config


def _attempts() -> StreamConfig:
    config = _records(ATTEMPTS, "infer.attempt.*.*", 64 * MIB, LOG_SECONDS)
    config.storage = StorageType.MEMORY
    return config


def _checkpoints() -> StreamConfig:
    """Configure the stream CHECKPOINTS: only the last checkpoint of each model is kept."""
    config = _records(CHECKPOINTS, "infer.checkpoint.*", 64 * MIB, MONTH_SECONDS)
    config.max_msgs_per_subject = 1
    return config


def _signals() -> StreamConfig:
    """Configure the stream SIGNALS, whose messages the broker copies to listeners of any account.

    It is no record: nothing is read back, so direct gets are not allowed.
    """
    return StreamConfig(
        name=SIGNALS,
        subjects=list(subjects.SIGNALS),
        republish=RePublish(
            src=f"{subjects.PREFIX}.>", dest=subjects.heard(f"{subjects.PREFIX}.>")
        ),
        max_age=SIGNAL_SECONDS,
        max_bytes=SIGNALS_BYTES,
        max_msg_size=MAX_SIGNAL_BYTES,
        duplicate_window=_LEAST_DUPLICATE_WINDOW,
        storage=StorageType.MEMORY,
    )


def _rollups() -> StreamConfig:
    """Configure the stream ROLLUPS: the newest sums of each tenant, day and model, and the cursor.

    They outlive the records of the ledger from which they were made.
    """
    config = _records(ROLLUPS, "infer.rollup.>", 256 * MIB, ROLLUP_SECONDS)
    config.max_msgs_per_subject = 1
    return config


def _reservations() -> StreamConfig:
    """Configure the stream RESERVATIONS: the newest message of each process that reserves.

    It is kept as long as the broker recognises what was added to a counter before.
    """
    config = _records(RESERVATIONS, subjects.ALL_RESERVATIONS, 64 * MIB, LOG_SECONDS)
    config.max_msgs_per_subject = 1
    return config


def _counters(name: str, subject: str, max_age: float, storage: StorageType) -> StreamConfig:
    """Configure counters by subject (ADR-49); each expires `max_age` s after its last change."""
    return StreamConfig(
        name=name,
        subjects=[subject],
        allow_msg_counter=True,
        max_msgs_per_subject=1,  # the newest message of a counter holds its total
        max_age=max_age,
        max_bytes=64 * MIB,
        duplicate_window=min(LOG_SECONDS, max_age),
        storage=storage,
        allow_direct=True,
    )


def _idempotency_bucket() -> StreamConfig:
    """Configure the stream of idempotency keys, a KV bucket (NATS ADR-8)."""
    return StreamConfig(
        name=f"KV_{IDEMPOTENCY_BUCKET}",
        subjects=[f"$KV.{IDEMPOTENCY_BUCKET}.>"],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_age=LOG_SECONDS,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
    )


def _token_log(shard: str, max_bytes: int) -> StreamConfig:
    return StreamConfig(
        name=token_stream_name(shard),
        subjects=[f"infer.token.{shard}.*.*.*"],
        republish=RePublish(
            src=f"infer.token.{shard}.*.*.*",
            dest="infer.reply.{{wildcard(1)}}.{{wildcard(2)}}.{{wildcard(3)}}",
        ),
        max_age=LOG_SECONDS,
        max_bytes=max_bytes,
        storage=StorageType.MEMORY,
        allow_direct=True,
    )


def ingress_stream(tenant: str) -> StreamConfig:
    """Return the configuration of the stream on which one tenant's producers submit requests.

    One stream per tenant, so that a tenant fills only its own. Gateways recognise a `Nats-Msg-Id`
    that came before, so that they can answer it; the broker would drop it in silence.
    """
    config = _queue(ingress_stream_name(tenant), subjects.submissions(tenant), INGRESS_BYTES)
    config.duplicate_window = _LEAST_DUPLICATE_WINDOW
    return config


def answers_stream(tenant: str) -> StreamConfig:
    """Return the configuration of the stream with the durable answers to one tenant's producers.

    One stream per tenant, so that a tenant fills only its own, and may be given the right to purge
    it. Whoever ends a request must not be held up by a producer that removes nothing, so a full
    stream drops its oldest answers; gateways accept no further requests long before.
    """
    name, subject = answers_stream_name(tenant), job_subjects.answers_of(tenant)
    config = _records(name, subject, ANSWERS_BYTES, ANSWERS_SECONDS)
    config.max_msgs_per_subject = 1
    config.duplicate_window = _LEAST_DUPLICATE_WINDOW
    return config


def ingress_consumer(tenant: str) -> ConsumerConfig:
    """Return the configuration of the consumer of an ingress stream, which all gateways share."""
    return ConsumerConfig(
        name=INGRESS_CONSUMER,
        durable_name=INGRESS_CONSUMER,
        filter_subject=subjects.submissions(tenant),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=10,
        max_ack_pending=1000,
    )


# A consumer has `name` beside `durable_name` so that the subject of the request to make it has both
# its name and its filter: rights at the broker are told by subjects.


def index_consumer(model: str, leader: str) -> ConsumerConfig:
    """Return the configuration of a dispatcher's consumer of all queued requests of a model.

    It delivers headers only, and a request stays unacknowledged until it is dispatched. `leader` is
    a name for this leadership: each leader makes its own consumer, so that a frozen predecessor
    that wakes up pulls from a consumer that no longer exists.
    """
    name = f"dispatcher_{_consumer_key(model)}_{leader}"
    return ConsumerConfig(
        name=name,
        durable_name=name,
        filter_subject=subjects.requests_of(model),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=LOG_SECONDS,
        max_ack_pending=-1,
        max_deliver=-1,
        headers_only=True,
    )


def is_index_of(consumer: str, index: str) -> bool:
    """Return whether the consumer name `consumer` is that of an index consumer of the same model.

    `index` is the name of one such consumer; the two may be of different leaders.
    """
    return consumer.rpartition("_")[0] == index.rpartition("_")[0]


def work_consumer(pool: PoolKey, ack_wait_seconds: float) -> ConsumerConfig:
    """Return the configuration of the consumer that all workers of a pool share, for one priority.

    If a worker dies, its work is delivered again, to any worker, after `ack_wait_seconds`.
    """
    name = f"pool_{_consumer_key(pool.model, pool.version)}_{pool.priority}"
    return ConsumerConfig(
        name=name,
        durable_name=name,
        filter_subject=subjects.work(pool),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_seconds,
        max_ack_pending=-1,
        max_deliver=MAX_DELIVERIES,
    )


def worker_consumer(
    model: str, version: str, worker: str, ack_wait_seconds: float
) -> ConsumerConfig:
    """Return the configuration of a worker's own consumer, for the work that was placed on it.

    The broker removes the consumer once nobody has pulled for `IDLE_CONSUMER_SECONDS`. A delivery
    that is not acknowledged is repeated after `ack_wait_seconds`.
    """
    name = f"worker_{_consumer_key(model, version)}_{worker}"
    return ConsumerConfig(
        name=name,
        durable_name=name,
        filter_subject=subjects.work_placed_on(model, version, worker),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_seconds,
        max_ack_pending=-1,
        max_deliver=MAX_DELIVERIES,
        inactive_threshold=IDLE_CONSUMER_SECONDS,
    )


def _consumer_key(*names: str) -> str:
    """Return names as part of a consumer's name: escaped, or as a digest where that is too long.

    The digest begins with `_z`, as no escaped name does, so it is never another model's name.
    """
    escaped = "_".join(map(subjects.escape, names))
    if len(escaped) <= _MAX_NAMED:
        return escaped
    return "_z" + hashlib.sha256(escaped.encode()).hexdigest()


def consumer_name_for(subject: str) -> str:
    """Return the name of the consumer that receives dispatched work on this subject.

    Raises ValueError if it is not a work subject.
    """
    pool, placement = subjects.parse_work(subject), subjects.placement(subject)
    if placement == subjects.ANY:
        return work_consumer(pool, ack_wait_seconds=1).durable_name or ""
    return worker_consumer(pool.model, pool.version, placement, 1).durable_name or ""

"""Streams and consumers as data, declared once; any service may `declare` them at start-up."""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nats.errors import Error as NatsError
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    DiscardPolicy,
    RePublish,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, BadRequestError, NotFoundError

from streams import subjects
from streams.errors import BrokerUnavailable
from streams.patience import answered_within, persistently
from streams.subjects import Pool

if TYPE_CHECKING:
    from nats.js import JetStreamContext

REQUESTS, WORK, LEDGER, DEAD = "REQUESTS", "WORK", "LEDGER", "DEAD"
ATTEMPTS, REPLAYS = "ATTEMPTS", "REPLAYS"
CHECKPOINTS = "CHECKPOINTS"
USAGE, RATES = "USAGE", "RATES"
MAX_DEADLINE_SECONDS = 600
DECLARE_SECONDS = 20.0
# A log outlives its request: the longest deadline and the time to resume behind it.
LOG_SECONDS = MAX_DEADLINE_SECONDS + 300
# A net: workers give up sooner (streams/history.py), and no drain or hand-over counts there.
MAX_DELIVERIES = 20
RATE_SECONDS = 300  # counters of a minute, and of a lease, are read for two of them
IDLE_CONSUMER_SECONDS = 3600.0
MIB = 2**20
_NAME_IN_USE, _INVALID_CONFIG = 10058, 10052
_BAD_REQUEST = 400


class TopologyMismatch(Exception):
    """A stream of our name exists that cannot be made ours: an operator must look."""


@dataclass(frozen=True)
class Scale:
    """What differs between a laptop and a cluster."""

    replicas: int = 1
    shards: int = 1


def tokens(shard: int) -> str:
    return f"TOKENS_{shard}"


def tokens_of(request_id: str, shards: int) -> str:
    """The stream that holds a request's log."""
    return tokens(subjects.shard(request_id, shards))


def ingress(tenant: str) -> str:
    return f"INGRESS_{subjects.token(tenant)}"


def streams(scale: Scale, max_queued: int) -> list[StreamConfig]:
    """Every stream but the ingresses (one per tenant). `max_queued` bounds the longest lane."""
    return [
        StreamConfig(
            name=REQUESTS,
            subjects=["infer.request.*.*.*"],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            discard_new_per_subject=True,
            max_msgs_per_subject=max_queued,
            max_bytes=1024 * MIB,
            duplicate_window=LOG_SECONDS,
            storage=StorageType.FILE,
            allow_direct=True,
        ),
        StreamConfig(
            name=WORK,
            subjects=["infer.work.*.*.*.*"],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,
            max_bytes=256 * MIB,
            duplicate_window=LOG_SECONDS,
            storage=StorageType.FILE,
            allow_direct=True,
        ),
        *(_token_log(scale, shard) for shard in range(scale.shards)),
        StreamConfig(
            name=LEDGER,
            subjects=["infer.ledger.*.*"],
            max_bytes=256 * MIB,
            max_age=30 * 86400,
            duplicate_window=LOG_SECONDS,
            storage=StorageType.FILE,
            allow_direct=True,
        ),
        StreamConfig(
            name=ATTEMPTS,
            subjects=["infer.attempt.*.*"],
            max_age=LOG_SECONDS,
            max_bytes=64 * MIB,
            storage=StorageType.MEMORY,
            allow_direct=True,
        ),
        StreamConfig(
            name=DEAD,
            subjects=["infer.dead.*.*"],
            max_bytes=64 * MIB,
            max_age=30 * 86400,
            storage=StorageType.FILE,
            allow_direct=True,
        ),
        StreamConfig(
            name=REPLAYS,
            subjects=[subjects.ALL_REPLAYS],
            max_bytes=16 * MIB,
            max_age=30 * 86400,
            storage=StorageType.FILE,
            allow_direct=True,
        ),
        StreamConfig(
            name=CHECKPOINTS,
            subjects=["infer.checkpoint.*"],
            max_msgs_per_subject=1,
            max_age=LOG_SECONDS,
            max_bytes=64 * MIB,
            storage=StorageType.FILE,
            allow_direct=True,
        ),
        _counters(USAGE, "infer.usage.*.*.*.*", 30 * 86400, StorageType.FILE),
        _counters(RATES, "infer.rate.*.*.*.*", RATE_SECONDS, StorageType.MEMORY),
    ]


def _counters(name: str, subject: str, max_age: float, storage: StorageType) -> StreamConfig:
    """Counters by subject (ADR-49), each forgotten by so long after its last change."""
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


def _token_log(scale: Scale, shard: int) -> StreamConfig:
    return StreamConfig(
        name=tokens(shard),
        subjects=[f"infer.token.{shard}.*.*.*"],
        republish=RePublish(
            src=f"infer.token.{shard}.*.*.*",
            dest="infer.reply.{{wildcard(1)}}.{{wildcard(2)}}.{{wildcard(3)}}",
        ),
        max_age=LOG_SECONDS,
        max_bytes=512 * MIB // scale.shards,
        storage=StorageType.MEMORY,
        allow_direct=True,
    )


def ingress_stream(tenant: str) -> StreamConfig:
    """Where one tenant's producers publish; their `Nats-Msg-Id` deduplicates among themselves."""
    return StreamConfig(
        name=ingress(tenant),
        subjects=[subjects.submissions(tenant)],
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        max_bytes=64 * MIB,
        duplicate_window=LOG_SECONDS,
        storage=StorageType.FILE,
        allow_direct=True,
    )


def ingress_consumer() -> ConsumerConfig:
    return ConsumerConfig(
        durable_name="gateways", ack_policy=AckPolicy.EXPLICIT, ack_wait=10, max_ack_pending=1000
    )


def index_consumer(model: str, leader: str) -> ConsumerConfig:
    """A model's leader: headers of every queued request, un-acked until dispatched.

    Each leader has one of its own: a frozen predecessor that wakes up pulls from none that exists.
    """
    return ConsumerConfig(
        durable_name=f"dispatcher_{subjects.escape(model)}_{leader}",
        filter_subject=subjects.requests_of(model),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=LOG_SECONDS,
        max_ack_pending=-1,
        max_deliver=-1,
        headers_only=True,
    )


def work_consumer(pool: Pool, ack_wait_seconds: float) -> ConsumerConfig:
    """A pool's shared consumer for one priority; a dead worker goes unseen for the ack wait."""
    model, version = subjects.escape(pool.model), subjects.escape(pool.version)
    return ConsumerConfig(
        durable_name=f"pool_{model}_{version}_{pool.priority}",
        filter_subject=subjects.work(pool),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_seconds,
        max_ack_pending=-1,
        max_deliver=MAX_DELIVERIES,
    )


def own_consumer(model: str, version: str, worker: str, ack_wait_seconds: float) -> ConsumerConfig:
    """A worker's consumer for what was placed on it; the broker removes it when nobody pulls."""
    names = subjects.escape(model), subjects.escape(version), worker
    return ConsumerConfig(
        durable_name="worker_{}_{}_{}".format(*names),
        filter_subject=subjects.placed(model, version, worker),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_seconds,
        max_ack_pending=-1,
        max_deliver=MAX_DELIVERIES,
        inactive_threshold=IDLE_CONSUMER_SECONDS,
    )


def consumer_of(subject: str) -> str:
    """The name of the consumer that work on this subject is for."""
    pool, placement = subjects.parse_work(subject), subjects.placement(subject)
    if placement == subjects.ANY:
        return work_consumer(pool, ack_wait_seconds=1).durable_name or ""
    return own_consumer(pool.model, pool.version, placement, 1).durable_name or ""


async def declare(js: "JetStreamContext", scale: Scale, max_queued: int) -> int:
    """Create what is missing and reconcile what changed. Idempotent; safe from several services.

    Returns the bound of a lane, which may be higher than `max_queued`: it never falls, since the
    broker would delete what waits above it.
    """
    declared = streams(scale, max_queued)
    for config in declared:
        await declare_stream(js, config, scale)
    return next(config.max_msgs_per_subject for config in declared if config.name == REQUESTS) or 0


async def wait_for(js: "JetStreamContext", stream: str, seconds: float = 30.0) -> None:
    """Wait until another service has declared a stream; raises `TopologyMismatch` if none does."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            await js.stream_info(stream)
        except (NatsError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise TopologyMismatch(f"no stream {stream} after {seconds:g} s") from error
            await asyncio.sleep(0.1)
        else:
            return


async def declare_stream(js: "JetStreamContext", config: StreamConfig, scale: Scale) -> None:
    """Create or update one stream.

    Raises `TopologyMismatch` where the broker refuses, with its reason, or `BrokerUnavailable`. A
    cluster may leave one of two services that declare at once without an answer: it asks again.
    """
    config.num_replicas = scale.replicas
    async with answered_within(DECLARE_SECONDS):
        await persistently(lambda: _declare_stream(js, config))


async def _declare_stream(js: "JetStreamContext", config: StreamConfig) -> None:
    try:
        await _create_or_update(js, config)
    except APIError as error:
        if error.code == _BAD_REQUEST or error.err_code == _INVALID_CONFIG:
            raise TopologyMismatch(f"stream {config.name}: {error.description}") from error
        raise BrokerUnavailable(f"stream {config.name} not declared: {error!r}") from error
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"stream {config.name} not declared: {error!r}") from error


async def declare_consumer(js: "JetStreamContext", stream: str, config: ConsumerConfig) -> None:
    """Create or update one consumer. Raises `TopologyMismatch` or `BrokerUnavailable`."""
    try:
        await js.add_consumer(stream, config)
    except BadRequestError as error:
        name = f"{stream}/{config.durable_name}"
        raise TopologyMismatch(f"consumer {name}: {error.description}") from error
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"no consumer declared on {stream}: {error!r}") from error


async def _create_or_update(js: "JetStreamContext", config: StreamConfig) -> None:
    assert config.name
    try:
        known = (await js.stream_info(config.name)).config
    except NotFoundError:
        if await _created(js, config):
            return
        known = (await js.stream_info(config.name)).config
    if config.discard_new_per_subject:
        bounds = (config.max_msgs_per_subject or 0, known.max_msgs_per_subject or 0)
        config.max_msgs_per_subject = max(bounds)
    if _differs(config, known):
        await js.update_stream(config)


def _differs(config: StreamConfig, known: StreamConfig) -> bool:
    """True when something that we set is set otherwise; 0 and None leave it to the broker."""
    return any(value and getattr(known, name) != value for name, value in vars(config).items())


async def _created(js: "JetStreamContext", config: StreamConfig) -> bool:
    """False when another service was faster, with other limits."""
    try:
        await js.add_stream(config)
    except BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise
        return False
    return True


async def take_over_index(js: "JetStreamContext", config: ConsumerConfig) -> None:
    """Create a leader's index consumer in place of its predecessors', which end with their pulls.

    Everything queued is delivered to it from the beginning. Raises `BrokerUnavailable`.
    """
    for info in await _consumers(js, REQUESTS):
        if info.config.filter_subject == config.filter_subject:
            await _delete(js, REQUESTS, info.name)
    try:
        await declare_consumer(js, REQUESTS, config)
    except TopologyMismatch as error:  # somebody else was faster
        raise BrokerUnavailable(str(error)) from error


async def _consumers(js: "JetStreamContext", stream: str) -> list[ConsumerInfo]:
    found: list[ConsumerInfo] = []
    while page := await js.consumers_info(stream, offset=len(found)):
        found += page
    return found


async def _delete(js: "JetStreamContext", stream: str, consumer: str) -> None:
    try:
        await js.delete_consumer(stream, consumer)
    except NotFoundError:
        return

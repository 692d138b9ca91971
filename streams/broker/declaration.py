"""Declares streams and consumers: brings what the broker has to what `topology` says."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from datetime import datetime

import orjson
import structlog
from nats.errors import Error as NatsError
from nats.js.api import (
    ConsumerConfig,
    ConsumerInfo,
    DiscardPolicy,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import APIError, BadRequestError, NotFoundError

from streams import topology
from streams.broker.broker_client import STORE_SECONDS, Broker, StreamMissing
from streams.broker.retry import retry_for
from streams.errors import BrokerMisconfigured, BrokerUnavailable
from streams.topology import Scale

DECLARE_SECONDS = 20.0
WAIT_SECONDS = 30.0  # of a service, for what the admin service declares
_DELETED_SECONDS = 0.2  # wait for the confirmation; the deletion happens without it
_INDEX_SECONDS = (0.4, 0.4, 0.4, 1.0, STORE_SECONDS)  # timeouts of the tries to create one
_NAME_IN_USE, _INVALID_CONFIG = 10058, 10052
# The server's file store or memory, or the account's share of it, has less left than is reserved
_NO_STORAGE, _NO_MEMORY = 10047, 10028
_BAD_REQUEST = 400
_UNSET = (None, 0, -1, False)
# What makes a stream refuse or drop messages. Where we set none of these, nobody may.
_RESTRICTIONS = frozenset(
    {
        "max_msgs",
        "max_msgs_per_subject",
        "max_msg_size",
        "max_bytes",
        "max_age",
        "max_consumers",
        "consumer_limits",
        "discard_new_per_subject",
        "no_ack",
        "sealed",
        "mirror",
        "sources",
        "subject_transform",
        "republish",
        "allow_msg_counter",
    }
)
log = structlog.get_logger()


class TopologyMismatch(BrokerMisconfigured):
    """A stream or consumer is missing, or has a configuration that cannot be changed to ours."""


async def declare(broker: Broker, scale: Scale, max_queued: int) -> int:
    """Create all streams that are missing and update those whose configuration has changed.

    Returns the limit of queued requests in a lane (one tenant's queue for a model and priority). It
    may be higher than `max_queued`, because it is never lowered: the broker would delete the
    requests above it. Idempotent; safe from several services at once. Raises as `declare_stream`.
    """
    declared = topology.stream_configs(scale, max_queued)
    for config in declared:
        await declare_stream(broker, config, scale)
    lanes = next(config for config in declared if config.name == topology.REQUESTS)
    return lanes.max_msgs_per_subject or 0


async def wait_for_stream(broker: Broker, stream: str, seconds: float = WAIT_SECONDS) -> StreamInfo:
    """Wait until the admin service has declared the stream; return what the broker says of it.

    Returns at once if it exists. Raises `TopologyMismatch` if it does not exist, or no broker has
    answered, after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await stream_info(broker, stream)
        except (NotFoundError, BrokerUnavailable) as error:
            if time.monotonic() > deadline:
                raise TopologyMismatch(
                    f"no stream {stream} after {seconds:g} s: `millstream admin` declares it; "
                    "start one, with the same `shards` as the other services"
                ) from error
            await asyncio.sleep(0.1)


async def declare_stream(broker: Broker, config: StreamConfig, scale: Scale) -> datetime | None:
    """Create or update one stream, with `scale.replicas`; returns when it was created.

    `config` is changed in place to what was declared. Raises `TopologyMismatch` with the broker's
    reason where the broker refuses. Retries for `DECLARE_SECONDS`, then raises `BrokerUnavailable`:
    of two services that declare at once, a cluster may leave one without an answer.
    """
    config.num_replicas = scale.replicas
    return await retry_for(DECLARE_SECONDS, lambda: _declare_stream(broker, config))


async def _declare_stream(broker: Broker, config: StreamConfig) -> datetime | None:
    with explaining_refusals(config):
        return await _create_or_update(broker, config)


@contextmanager
def explaining_refusals(config: StreamConfig) -> Iterator[None]:
    """Turn nats-py's errors of the block, which declares a stream, into ours, in NATS's own words.

    Raises `TopologyMismatch` where an operator must act, else `BrokerUnavailable`.
    """
    try:
        yield
    except APIError as error:
        reason = f"stream {config.name} is not declared: {error.description}"
        if error.err_code in (_NO_STORAGE, _NO_MEMORY):
            setting = "max_file_store" if error.err_code == _NO_STORAGE else "max_memory_store"
            raise TopologyMismatch(
                f"{reason}; it reserves {config.max_bytes} bytes of the broker's {setting}"
            ) from error
        if error.code == _BAD_REQUEST or error.err_code == _INVALID_CONFIG:
            raise TopologyMismatch(reason) from error
        raise BrokerUnavailable(reason) from error
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"stream {config.name} is not declared: {error!r}") from error


async def stream_info(broker: Broker, stream: str, subjects: str | None = None) -> StreamInfo:
    """Return a stream's configuration and state, as the broker has them.

    With a filter `subjects`, the state also has the number of messages on each subject that
    matches. Raises nats-py's `NotFoundError` if there is no such stream, `BrokerUnavailable` if no
    answer comes.
    """
    return await broker.call_api(lambda js: js.stream_info(stream, subjects))


async def consumer_info(broker: Broker, stream: str, name: str) -> ConsumerInfo | None:
    """Return a consumer's configuration and state; None if it does not exist.

    Raises `BrokerUnavailable` if no answer comes.
    """
    try:
        return await broker.call_api(lambda js: js.consumer_info(stream, name))
    except NotFoundError:
        return None


def count_deliveries(info: ConsumerInfo) -> int:
    """Return how many deliveries a consumer has made since its creation, with repeated ones."""
    return info.delivered.consumer_seq if info.delivered else 0


async def declare_consumer(
    broker: Broker, stream: str, config: ConsumerConfig, seconds: float = STORE_SECONDS
) -> None:
    """Create a consumer, or update it to `config`; tries once.

    Raises `TopologyMismatch` if the broker refuses the configuration, `BrokerUnavailable` if no
    answer comes within `seconds`.
    """
    try:
        await broker.js.add_consumer(stream, config, timeout=seconds)
    except BadRequestError as error:
        name = f"{stream}/{config.durable_name}"
        raise TopologyMismatch(f"consumer {name}: {error.description}") from error
    except NotFoundError as error:
        broker.request_declaration()
        raise StreamMissing(f"there is no stream {stream}") from error
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"no consumer declared on {stream}: {error!r}") from error


async def _create_or_update(broker: Broker, config: StreamConfig) -> datetime | None:
    assert config.name
    try:
        info = await stream_info(broker, config.name)
    except NotFoundError:
        await create_stream(broker, config)
        info = await stream_info(broker, config.name)
    _keep_contents(config, info)
    if changed := _list_differences(config, info.config):
        await broker.js.update_stream(config)
        log.warning("stream_updated", stream=config.name, changed=changed)
    return info.created


def _keep_contents(config: StreamConfig, info: StreamInfo) -> None:
    """Keep limits that hold what is stored, which the broker would delete, and more replicas."""
    known = info.config
    config.num_replicas = max(config.num_replicas or 1, known.num_replicas or 1)
    if config.discard_new_per_subject:
        bounds = (config.max_msgs_per_subject or 0, known.max_msgs_per_subject or 0)
        config.max_msgs_per_subject = max(bounds)
    if config.discard is DiscardPolicy.NEW and config.max_bytes:
        config.max_bytes = max(config.max_bytes, info.state.bytes)


def _list_differences(config: StreamConfig, known: StreamConfig) -> list[str]:
    """Return the fields that must be changed: those that we set, and restrictions that we do not.

    All others are left to the broker and its operator.
    """
    found = []
    for name, value in vars(config).items():
        present = getattr(known, name)
        if value in _UNSET:
            differs = name in _RESTRICTIONS and not _is_unset(present)
        else:
            differs = present != value
        if differs:
            found.append(name)
    return found


def _is_unset(value: object) -> bool:
    """Return whether a field limits nothing; NATS also sends objects in which nothing is set."""
    parts = vars(value).values() if is_dataclass(value) else (value,)
    return all(part in _UNSET for part in parts)


async def _exists(broker: Broker, config: StreamConfig) -> bool:
    assert config.name
    try:
        await stream_info(broker, config.name)
    except NotFoundError:
        return False
    return True


async def create_stream(broker: Broker, config: StreamConfig) -> None:
    """Create a stream; one that another service has created meanwhile, with any limits, stays.

    Its sequences begin with the time in milliseconds, so that they go on rising when the stream is
    made anew: what was known of the old one is older than all that the new one holds.
    """
    first = max(1, broker.clock.now_ms())
    try:
        await broker.js.add_stream(config.evolve(first_seq=first))
    except APIError as error:
        if error.err_code != _NAME_IN_USE and not await _exists(broker, config):
            raise
        # a faster service's stream may also have taken the room for ours


async def replace_index_consumer(broker: Broker, model: str) -> str:
    """Create a new consumer of a model's queued requests and remove those of earlier leaders.

    A dispatcher calls this when it becomes the model's leader. The earlier leaders' pulls end, and
    all queued requests are delivered to the new consumer from the beginning. Returns the consumer's
    name. Raises `BrokerUnavailable` if it was not created in any of five tries. In a cluster, the
    server that led an earlier consumer may be dead, so nothing is asked that only that server
    answers. The server that is to lead the new consumer may be dead, too: then the consumer is
    created again, which chooses another server in two of three cases.
    """
    reason = ""
    for seconds in _INDEX_SECONDS:
        config = topology.index_consumer(model, secrets.token_hex(4))
        assert config.durable_name
        await _remove_index_consumers(broker, config.durable_name)
        try:
            await declare_consumer(broker, topology.REQUESTS, config, seconds)
        except (TopologyMismatch, BrokerUnavailable) as error:  # or a predecessor's still exists
            reason = str(error)
        else:
            return config.durable_name
    raise BrokerUnavailable(f"no index of {model}: {reason}")


async def _remove_index_consumers(broker: Broker, index: str) -> None:
    for name in await _list_consumers(broker, topology.REQUESTS):
        if topology.is_index_of(name, index):
            subject = broker.api_subject(f"CONSUMER.DELETE.{topology.REQUESTS}.{name}")
            await broker.request(subject, seconds=_DELETED_SECONDS)


async def _list_consumers(broker: Broker, stream: str) -> list[str]:
    call = f"CONSUMER.NAMES.{stream}"
    return await _list_names(broker, broker.api_subject(call), "consumers", {})


async def list_streams(broker: Broker, subject: str) -> list[str]:
    """Return the names of the streams that store a subject, or one that matches this filter.

    With accounts, those of the store of requests. Raises `BrokerUnavailable`.
    """
    names = broker.api_subject("STREAM.NAMES")
    return await _list_names(broker, names, "streams", {"subject": subject})


async def _list_names(
    broker: Broker, subject: str, kind: str, query: Mapping[str, str]
) -> list[str]:
    found: list[str] = []
    while page := await _list_names_page(broker, subject, kind, {**query, "offset": len(found)}):
        found += page
    return found


async def _list_names_page(
    broker: Broker, subject: str, kind: str, query: Mapping[str, str | int]
) -> list[str]:
    answer = await broker.request(subject, orjson.dumps(dict(query)), STORE_SECONDS)
    parsed = orjson.loads(answer) if answer else {}
    if "total" not in parsed:
        raise BrokerUnavailable(f"no answer to {subject}")
    return list(parsed.get(kind) or ())


async def delete_if_empty(broker: Broker, stream: str) -> None:
    """Delete a stream in which nothing is stored; raises `BrokerUnavailable`."""
    with explaining_refusals(StreamConfig(name=stream)):
        if not (await stream_info(broker, stream)).state.messages:
            await broker.js.delete_stream(stream)
            log.info("stream_deleted", stream=stream)


async def remove_if_empty(broker: Broker, stream: str, closed_subject: str) -> None:
    """Delete a stream in which nothing is stored; one that holds something stays, with a warning.

    First its subjects are taken from it, so that nothing can be stored meanwhile; `closed_subject`
    is one that nobody publishes on. Raises `BrokerUnavailable`.
    """
    with explaining_refusals(StreamConfig(name=stream)):
        config = (await stream_info(broker, stream)).config
        await broker.js.update_stream(config.evolve(subjects=[closed_subject]))
        if stored := (await stream_info(broker, stream)).state.messages:
            log.warning("stream_left", stream=stream, messages=stored)
            return
        await broker.js.delete_stream(stream)
    log.info("stream_deleted", stream=stream)

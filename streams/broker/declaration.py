"""Declaring streams and consumers: whatever the broker has is brought to what `topology` says."""

import asyncio
import secrets
import time

import orjson
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, ConsumerInfo, StreamConfig, StreamInfo
from nats.js.errors import APIError, BadRequestError, NotFoundError

from streams import topology
from streams.broker.connection import STORE_SECONDS, Broker
from streams.broker.retry import retry_for
from streams.errors import BrokerUnavailable
from streams.topology import Scale

DECLARE_SECONDS = 20.0
_DELETED_SECONDS = 0.2  # for the word that it is; it is without
_INDEX_SECONDS = (0.4, 0.4, 0.4, 1.0, STORE_SECONDS)  # for the tries to make one
_NAME_IN_USE, _INVALID_CONFIG = 10058, 10052
_BAD_REQUEST = 400


class TopologyMismatch(Exception):
    """A stream of our name exists that cannot be made ours: an operator must look."""


async def declare(broker: Broker, scale: Scale, max_queued: int) -> int:
    """Create what is missing and reconcile what changed. Idempotent; safe from several services.

    Returns the bound of a lane, which may be higher than `max_queued`: it never falls, since the
    broker would delete what waits above it.
    """
    declared = topology.stream_configs(scale, max_queued)
    for config in declared:
        await declare_stream(broker, config, scale)
    lanes = next(config for config in declared if config.name == topology.REQUESTS)
    return lanes.max_msgs_per_subject or 0


async def wait_for_stream(broker: Broker, stream: str, seconds: float = 30.0) -> None:
    """Wait until another service has declared a stream; raises `TopologyMismatch` if none does."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            await stream_info(broker, stream)
        except (NotFoundError, BrokerUnavailable) as error:
            if time.monotonic() > deadline:
                raise TopologyMismatch(f"no stream {stream} after {seconds:g} s") from error
            await asyncio.sleep(0.1)
        else:
            return


async def declare_stream(broker: Broker, config: StreamConfig, scale: Scale) -> None:
    """Create or update one stream.

    Raises `TopologyMismatch` where the broker refuses, with its reason, or `BrokerUnavailable`. A
    cluster may leave one of two services that declare at once without an answer: it asks again.
    """
    config.num_replicas = scale.replicas
    await retry_for(DECLARE_SECONDS, lambda: _declare_stream(broker, config))


async def _declare_stream(broker: Broker, config: StreamConfig) -> None:
    try:
        await _create_or_update(broker, config)
    except APIError as error:
        if error.code == _BAD_REQUEST or error.err_code == _INVALID_CONFIG:
            raise TopologyMismatch(f"stream {config.name}: {error.description}") from error
        raise BrokerUnavailable(f"stream {config.name} not declared: {error!r}") from error
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"stream {config.name} not declared: {error!r}") from error


async def stream_info(broker: Broker, stream: str, subjects: str | None = None) -> StreamInfo:
    """What the broker says of a stream, with its count of messages on each of `subjects`.

    Raises nats-py's `NotFoundError`, or `BrokerUnavailable`.
    """
    return await broker.call_api(lambda js: js.stream_info(stream, subjects))


async def consumer_info(broker: Broker, stream: str, name: str) -> ConsumerInfo | None:
    """What the broker says of a consumer; None if there is none. Raises `BrokerUnavailable`."""
    try:
        return await broker.call_api(lambda js: js.consumer_info(stream, name))
    except NotFoundError:
        return None


def count_deliveries(info: ConsumerInfo) -> int:
    """How many messages a consumer has delivered since it was made."""
    return info.delivered.consumer_seq if info.delivered else 0


async def declare_consumer(
    broker: Broker, stream: str, config: ConsumerConfig, seconds: float = STORE_SECONDS
) -> None:
    """Create or update one consumer. Raises `TopologyMismatch` or `BrokerUnavailable`."""
    try:
        await broker.js.add_consumer(stream, config, timeout=seconds)
    except BadRequestError as error:
        name = f"{stream}/{config.durable_name}"
        raise TopologyMismatch(f"consumer {name}: {error.description}") from error
    except (NatsError, TimeoutError, OSError) as error:
        raise BrokerUnavailable(f"no consumer declared on {stream}: {error!r}") from error


async def _create_or_update(broker: Broker, config: StreamConfig) -> None:
    assert config.name
    try:
        known = (await stream_info(broker, config.name)).config
    except NotFoundError:
        if await _try_create(broker, config):
            return
        known = (await stream_info(broker, config.name)).config
    if config.discard_new_per_subject:
        bounds = (config.max_msgs_per_subject or 0, known.max_msgs_per_subject or 0)
        config.max_msgs_per_subject = max(bounds)
    if _differs(config, known):
        await broker.js.update_stream(config)


def _differs(config: StreamConfig, known: StreamConfig) -> bool:
    """True when something that we set is set otherwise; 0 and None leave it to the broker."""
    return any(value and getattr(known, name) != value for name, value in vars(config).items())


async def _try_create(broker: Broker, config: StreamConfig) -> bool:
    """False when another service was faster, with other limits."""
    try:
        await broker.js.add_stream(config)
    except BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise
        return False
    return True


async def replace_index_consumer(broker: Broker, model: str) -> str:
    """Make a leader's index consumer in place of its predecessors', which end with their pulls.

    Everything queued is delivered to it from the beginning. Returns its name; raises
    `BrokerUnavailable`. In a cluster, who led a predecessor's consumer may be what has died:
    nothing is asked that only it answers. So may be who is to lead the new one: then it is made
    again, which chooses another one in two of three cases.
    """
    reason = ""
    for seconds in _INDEX_SECONDS:
        config = topology.index_consumer(model, secrets.token_hex(4))
        assert config.durable_name
        await _remove_index_consumers(broker, config.durable_name)
        try:
            await declare_consumer(broker, topology.REQUESTS, config, seconds)
        except (TopologyMismatch, BrokerUnavailable) as error:  # or a predecessor is still there
            reason = str(error)
        else:
            return config.durable_name
    raise BrokerUnavailable(f"no index of {model}: {reason}")


async def _remove_index_consumers(broker: Broker, index: str) -> None:
    for name in await _list_consumers(broker, topology.REQUESTS):
        if topology.is_index_of(name, index):
            subject = f"$JS.API.CONSUMER.DELETE.{topology.REQUESTS}.{name}"
            await broker.request(subject, seconds=_DELETED_SECONDS)


async def _list_consumers(broker: Broker, stream: str) -> list[str]:
    found: list[str] = []
    while page := await _list_consumers_page(
        broker, f"$JS.API.CONSUMER.NAMES.{stream}", len(found)
    ):
        found += page
    return found


async def _list_consumers_page(broker: Broker, subject: str, offset: int) -> list[str]:
    answer = await broker.request(subject, orjson.dumps({"offset": offset}), STORE_SECONDS)
    names = orjson.loads(answer).get("consumers") if answer else None
    if names is None:
        raise BrokerUnavailable(f"no answer to {subject}")
    return list(names)

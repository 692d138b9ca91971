"""Declares streams and consumers: brings what the broker has to what `topology` says."""

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
_DELETED_SECONDS = 0.2  # wait for the confirmation; the deletion happens without it
_INDEX_SECONDS = (0.4, 0.4, 0.4, 1.0, STORE_SECONDS)  # timeouts of the tries to create one
_NAME_IN_USE, _INVALID_CONFIG = 10058, 10052
_BAD_REQUEST = 400


class TopologyMismatch(Exception):
    """A stream or consumer is missing, or its configuration cannot be changed to the declared one.

    A retry does not help: an operator must look.
    """


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


async def wait_for_stream(broker: Broker, stream: str, seconds: float = 30.0) -> None:
    """Wait until another service has declared the stream; return at once if it exists.

    Raises `TopologyMismatch` if it does not exist, or no broker has answered, after `seconds`.
    """
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
    """Create a stream, or update it if its configuration differs; `scale` gives the replicas.

    `config` is changed in place to what was declared. Raises `TopologyMismatch` with the broker's
    reason where the broker refuses. Retries for `DECLARE_SECONDS`, then raises `BrokerUnavailable`:
    of two services that declare at once, a cluster may leave one without an answer.
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
    """Return whether any field that we set has another value; 0 and None leave it to the broker."""
    return any(value and getattr(known, name) != value for name, value in vars(config).items())


async def _try_create(broker: Broker, config: StreamConfig) -> bool:
    """Create a stream; returns False when another service has created it with other limits."""
    try:
        await broker.js.add_stream(config)
    except BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise
        return False
    return True


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

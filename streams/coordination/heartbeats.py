"""Heartbeats, checked before they are believed.

A worker may publish on its own subjects alone, but a heartbeat's body is its own to write: it could
name another worker, or deliveries that are no deliveries, which a leader then gives back with its
own rights.
"""

from collections.abc import Mapping
from functools import lru_cache

from streams import subjects, topology
from streams.delivery_reply import DeliveryReply
from streams.messages import Heartbeat
from streams.prefix_hashes import HASH_BYTES
from streams.subjects import PoolKey, Priority

_LIMIT = 2**53  # of numbers that are exact in every language


class InvalidHeartbeat(ValueError):
    """A message is no heartbeat of the worker and model that its subject names."""


def parse_heartbeat(subject: str, headers: Mapping[str, str], payload: bytes) -> Heartbeat:
    """Return the heartbeat that was heard on a subject; raises `InvalidHeartbeat`.

    It has no headers, as an answer of the broker that somebody had sent here would have. It names
    the worker and model of its subject, and as `taken` only deliveries that this worker can have
    had: of the consumers of its pool and of its own. Its numbers are whole, and within what any
    machine has: a leader reckons with them.
    """
    if headers:
        raise InvalidHeartbeat("it has headers: it is an answer of the broker")
    try:
        beat = Heartbeat.unpack(payload)
        is_own = subjects.fleet(beat.model, beat.worker) == subject
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidHeartbeat(f"its {len(payload)} bytes are no heartbeat") from error
    if not is_own:
        raise InvalidHeartbeat("it names another worker or model than its subject")
    if not _has_sound_values(beat):
        raise InvalidHeartbeat("its numbers are none that a worker can have")
    if not all(_is_delivery_to(beat, reply) for reply in beat.taken):
        raise InvalidHeartbeat("it names deliveries that this worker cannot have had")
    return beat


def _has_sound_values(beat: Heartbeat) -> bool:
    try:
        counts = [
            *(beat.running, beat.waiting, beat.max_sequences, beat.kv_tokens),
            *(beat.generated_tokens, beat.pulled_own, *beat.pulled.values()),
            *beat.drained.values(),
            *(number for pair in beat.progress for number in pair),
        ]
        rooms = [(beat.free_sequences, beat.free_tokens), *beat.room.values()]
        free = [number for sequences, tokens in rooms for number in (sequences, tokens)]
        names = [
            beat.version,
            beat.type,
            *beat.pulled,
            *beat.room,
            *beat.drained,
            *beat.taken,
            *beat.load,
        ]
        names += [*beat.not_loaded, *beat.not_loaded.values()]
        hashes = [beat.holds, beat.dropped]
        measures = [beat.tokens_per_second, *beat.load.values()]
    except (TypeError, ValueError, AttributeError):
        return False  # something else where a list or a map should be
    return (
        all(type(each) is int and 0 <= each < _LIMIT for each in counts)
        and all(type(each) is int and -_LIMIT < each < _LIMIT for each in free)
        and all(type(each) is str for each in names)
        and all(type(each) is bytes and len(each) % HASH_BYTES == 0 for each in hashes)
        and all(len(pair) == 2 for pair in beat.progress)
        and all(isinstance(each, int | float) and 0 <= each < _LIMIT for each in measures)
    )


def _is_delivery_to(beat: Heartbeat, reply: str) -> bool:
    try:
        delivery = DeliveryReply.parse(reply)
    except (ValueError, IndexError):
        return False
    consumers = _consumers(beat.model, beat.version, beat.worker)
    return delivery.stream == topology.WORK and delivery.consumer in consumers


@lru_cache(maxsize=1024)
def _consumers(model: str, version: str, worker: str) -> frozenset[str]:
    """Names of the consumers from which a worker pulls."""
    pools = (topology.work_consumer(PoolKey(model, version, each), 1) for each in Priority)
    own = topology.worker_consumer(model, version, worker, 1)
    return frozenset(config.name or "" for config in (*pools, own))

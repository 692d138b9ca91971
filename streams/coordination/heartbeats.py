"""Heartbeats, checked before they are believed.

A worker may publish on its own subjects alone, but a heartbeat's body is its own to write: it could
name another worker, or deliveries that are no deliveries, which a leader then gives back with its
own rights.
"""

from collections.abc import Mapping
from functools import lru_cache

from streams import subjects, topology
from streams.messages import Heartbeat
from streams.subjects import PoolKey, Priority

_ACKS = ["$JS", "ACK", topology.WORK]


class InvalidHeartbeat(ValueError):
    """A message is no heartbeat of the worker and model that its subject names."""


def parse_heartbeat(subject: str, headers: Mapping[str, str], payload: bytes) -> Heartbeat:
    """Return the heartbeat that was heard on a subject; raises `InvalidHeartbeat`.

    It has no headers, as an answer of the broker that somebody had sent here would have. It names
    the worker and model of its subject, and as `taken` only deliveries that this worker can have
    had: of the consumers of its pool and of its own.
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
    if not all(_is_delivery_to(beat, reply) for reply in beat.taken):
        raise InvalidHeartbeat("it names deliveries that this worker cannot have had")
    return beat


def _is_delivery_to(beat: Heartbeat, reply: str) -> bool:
    try:
        subjects.parse_ack_subject(reply)
    except (ValueError, IndexError):
        return False
    fields = reply.split(".")
    if len(fields) > 9:  # as `subjects.parse_ack_subject` has them
        fields = fields[:2] + fields[4:]
    return fields[:3] == _ACKS and fields[3] in _consumers(beat.model, beat.version, beat.worker)


@lru_cache(maxsize=1024)
def _consumers(model: str, version: str, worker: str) -> frozenset[str]:
    """Names of the consumers from which a worker pulls."""
    pools = (topology.work_consumer(PoolKey(model, version, each), 1) for each in Priority)
    own = topology.worker_consumer(model, version, worker, 1)
    return frozenset(config.name or "" for config in (*pools, own))

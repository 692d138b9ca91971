"""Gateways' beats: how busy each is, checked before they are believed. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from streams import messages, subjects

_LIMIT = 2**53  # of numbers that are exact in every language


class InvalidGatewayBeat(ValueError):
    """A message is no beat of the gateway that its subject names."""


@dataclass(frozen=True)
class GatewayBeat:
    """A gateway's report on its own load, sent about once a second.

    `requests` counts the submissions that it has prepared (checked and tokenised) since it started,
    and `preparation_seconds` is the time that this took, waiting for a thread included.
    `connections` are open now, of HTTP and WebSocket. `loop_lag_seconds` is the longest delay of a
    timer since the last beat.
    """

    gateway: str
    connections: int
    requests: int
    preparation_seconds: float
    loop_lag_seconds: float
    draining: bool = False

    def pack(self) -> bytes:
        """Return the beat encoded as msgpack."""
        return messages.pack(self)


def parse_gateway_beat(subject: str, headers: Mapping[str, str], payload: bytes) -> GatewayBeat:
    """Return the beat that was heard on a subject; raises `InvalidGatewayBeat`.

    It has no headers, as an answer of the broker that somebody had sent here would have, names the
    gateway of its subject, and has numbers that a process can have.
    """
    if headers:
        raise InvalidGatewayBeat("it has headers: it is an answer of the broker")
    try:
        beat = messages.from_wire(GatewayBeat, messages.unpack(payload))
        is_own = subjects.gateway(beat.gateway) == subject
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidGatewayBeat(f"its {len(payload)} bytes are no beat") from error
    if not is_own:
        raise InvalidGatewayBeat("it names another gateway than its subject")
    if not all(_is_sound(each.type, getattr(beat, each.name)) for each in fields(beat)):
        raise InvalidGatewayBeat("its numbers are none that a gateway can have")
    return beat


def _is_sound(wanted: Any, value: object) -> bool:
    if wanted is int:
        return type(value) is int and 0 <= value < _LIMIT
    if wanted is float:
        return type(value) in (int, float) and 0 <= value < _LIMIT  # type: ignore[operator]
    return type(value) is wanted

"""Signals, checked before they are obeyed: cancel, drain and gone; and answers to a drain order.

A sender stores a signal in the stream SIGNALS, and the broker copies it to the subject that
`subjects.heard` names, where listeners hear it at most once. Whoever may ask the broker something
can have its answer sent to any of these subjects, as the question's reply subject: so a body that
is not of its signal's kind is refused. Pure.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from streams import subjects


class InvalidSignal(ValueError):
    """A message is no signal. The reason tells nothing of its body, which may be anybody's text."""


@dataclass(frozen=True)
class DrainAccepted:
    """A worker's answer to a drain order: it drains, and ends within `within` seconds."""

    within: float


@dataclass(frozen=True)
class DrainReport:
    """Counts of the requests that a worker held when its drain began, by what became of them.

    `finished` ended on this worker; `handed_over` were returned to the broker for other workers.
    """

    finished: int = 0
    handed_over: int = 0


def parse_cancel(subject: str, payload: bytes) -> tuple[str, str]:
    """Return tenant and request id of a cancel; raises `InvalidSignal` unless the body is empty."""
    if payload:
        raise InvalidSignal(f"its body has {len(payload)} bytes, and a cancel has none")
    return subjects.parse_request_id(subject)


def parse_gone(subject: str, payload: bytes) -> str:
    """Return the name of the worker that is said to have died; raises `InvalidSignal`."""
    try:
        return subjects.token(payload.decode())
    except ValueError:
        raise InvalidSignal(f"its body of {len(payload)} bytes names no worker") from None


def pack_drain(within: float) -> bytes:
    """Return the body of an order to drain within so many seconds."""
    return json.dumps({"within": within}).encode()


def parse_drain(subject: str, payload: bytes) -> float:
    """Return the seconds within which a worker is to drain; raises `InvalidSignal`.

    They are 0 or more, and finite.
    """
    return _parse_within(_parse_object(payload))


def pack_drain_answer(answer: DrainAccepted | DrainReport) -> bytes:
    """Return the body of a worker's answer to a drain order."""
    return json.dumps(asdict(answer)).encode()


def parse_drain_answer(payload: bytes) -> DrainAccepted | DrainReport:
    """Return a worker's answer to a drain order; raises `InvalidSignal`."""
    found = _parse_object(payload)
    if "within" in found:
        return DrainAccepted(_parse_within(found))
    return DrainReport(_parse_count(found, "finished"), _parse_count(found, "handed_over"))


def _parse_object(payload: bytes) -> Mapping[str, object]:
    try:
        found = json.loads(payload)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidSignal(f"its body of {len(payload)} bytes is no JSON object")
    return found


def _parse_within(found: Mapping[str, object]) -> float:
    within = found.get("within")
    if isinstance(within, int | float) and not isinstance(within, bool) and 0 <= within < math.inf:
        return within
    raise InvalidSignal("its `within` is no number of seconds")


def _parse_count(found: Mapping[str, object], name: str) -> int:
    count = found.get(name)
    if type(count) is int and count >= 0:
        return count
    raise InvalidSignal(f"its `{name}` is no count")

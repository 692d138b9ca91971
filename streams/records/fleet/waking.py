"""News of a model whose first worker is on its way, as the fleet tells them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from streams import messages, subjects

PHASES = ("ordered", "booting", "loading")


class InvalidWaking(ValueError):
    """A message does not tell of the model that its subject names."""


@dataclass(frozen=True)
class Waking:
    """The progress of a model's wake.

    `phase` is one of `PHASES`: its machine is `ordered` as long as there is none, then `booting`,
    and its worker is `loading` the model until that has warmed up. `ready_at` (epoch seconds) is
    when that is expected, None while nobody can say.
    """

    model: str
    phase: str
    ready_at: float | None = None

    def pack(self) -> bytes:
        """Return the message encoded as msgpack."""
        return messages.pack(self)

    def seconds_left(self, now: float) -> float | None:
        """Return the time until the model is ready, in seconds to a tenth; None if unknown."""
        return None if self.ready_at is None else round(max(0.0, self.ready_at - now), 1)


def parse_waking(subject: str, headers: Mapping[str, str], payload: bytes) -> Waking:
    """Return what was heard on a subject; raises `InvalidWaking`."""
    if headers:
        raise InvalidWaking("it has headers: it is an answer of the broker")
    try:
        found = messages.from_wire(Waking, messages.unpack(payload))
        is_own = subjects.waking(found.model) == subject
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidWaking(f"its {len(payload)} bytes tell of no model") from error
    is_time = found.ready_at is None or (
        type(found.ready_at) in (int, float) and isfinite(found.ready_at)
    )
    if not is_own or found.phase not in PHASES or not is_time:
        raise InvalidWaking("it tells of another model than its subject, or of no phase")
    return found

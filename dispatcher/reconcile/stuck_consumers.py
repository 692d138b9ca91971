"""Notices consumers that have messages, are asked for them and deliver none. Pure."""

from dataclasses import dataclass

STUCK_SECONDS = 5.0  # a lost pull is renewed sooner


@dataclass(frozen=True, slots=True)
class _Seen:
    deliveries: int
    since: float


class StuckConsumers:
    """Remembers by consumer since when nothing was delivered; times are the caller's seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def is_stuck(self, consumer: str, deliveries: int, now: float, *, due: bool) -> bool:
        """True if a consumer has delivered nothing for `STUCK_SECONDS` though it should have.

        `deliveries` is its count of deliveries since it was made; `due` is True while there is
        something to deliver. After True the time begins anew.
        """
        seen = self._seen.get(consumer)
        if not due:
            self._seen.pop(consumer, None)
        elif seen is None or seen.deliveries != deliveries:
            self._seen[consumer] = _Seen(deliveries, now)
        elif now - seen.since >= STUCK_SECONDS:
            del self._seen[consumer]
            return True
        return False

"""Notices consumers that have messages, are asked for them and deliver none. Pure."""

from dataclasses import dataclass

STUCK_SECONDS = 5.0  # a lost pull is renewed sooner


@dataclass(frozen=True, slots=True)
class _Seen:
    deliveries: int
    since: float


class StuckConsumerDetector:
    """Finds consumers that have delivered nothing for `STUCK_SECONDS` (5 s) though they should.

    It remembers the deliveries of each consumer from call to call. Times are the caller's seconds.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def is_stuck(self, consumer: str, deliveries: int, now: float, *, due: bool) -> bool:
        """Return True if a consumer has delivered nothing for `STUCK_SECONDS` though it was `due`.

        Call it regularly for each consumer. `deliveries` is the consumer's count of deliveries
        since it was made; `due` is True while it has something to deliver and is asked for it.
        After True, and whenever it is not due, the time begins anew.
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

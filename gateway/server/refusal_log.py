"""Logs credentials that were refused, at most one event a second. Pure."""

import structlog

_PAUSE_SECONDS = 1.0
log = structlog.get_logger()


class RefusalLog:
    """Samples refused credentials: an event a second, with the number of those not told of."""

    def __init__(self) -> None:
        self._logged_at = -float("inf")
        self._untold = 0

    def record(self, entry_point: str, address: str, code: str, now: float) -> None:
        """Log one refusal, or count it for the next event; `now` is in seconds of any clock.

        The credential itself is in no event, nor is a part or a hash of it.
        """
        if now - self._logged_at < _PAUSE_SECONDS:
            self._untold += 1
            return
        log.warning(
            "credential_refused",
            entry_point=entry_point,
            address=address,
            code=code,
            untold=self._untold,
        )
        self._logged_at, self._untold = now, 0

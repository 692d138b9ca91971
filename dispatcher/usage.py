"""Who has used how much of late, against their share. Pure."""

from math import exp

from dispatcher.recent import MOST

SECONDS = 60.0  # what was used fades by 1/e in this time
LEAST = 1.0  # virtual tokens; whoever has used less is forgotten


class Usage:
    """Service by tenant, in virtual tokens, of what has ended in about the last minute."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}  # as of when

    def add(self, tenant: str, service: float, now: float) -> None:
        self._used[tenant] = self.of(tenant, now) + service, now
        if len(self._used) > MOST:
            self._used = {t: u for t, u in self._used.items() if self.of(t, now) >= LEAST}

    def of(self, tenant: str, now: float) -> float:
        used, at = self._used.get(tenant, (0.0, now))
        return used * exp((at - now) / SECONDS)

    def recent(self, now: float) -> dict[str, float]:
        """What each tenant has used that has used anything to speak of."""
        found = {tenant: self.of(tenant, now) for tenant in self._used}
        return {tenant: used for tenant, used in found.items() if used >= LEAST}

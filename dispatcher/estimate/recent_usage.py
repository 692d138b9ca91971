"""Who has used how much of late, against their share. Pure."""

from math import exp

from dispatcher.estimate.ttl_set import MAX_MEMBERS

DECAY_SECONDS = 60.0  # what was used fades by 1/e in this time
MIN_TOKENS = 1.0  # virtual tokens; whoever has used less is forgotten


class RecentUsage:
    """Service by tenant, in virtual tokens, of what has ended in about the last minute."""

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}  # as of when

    def add(self, tenant: str, service: float, now: float) -> None:
        self._used[tenant] = self.get(tenant, now) + service, now
        if len(self._used) > MAX_MEMBERS:
            self._used = {t: u for t, u in self._used.items() if self.get(t, now) >= MIN_TOKENS}

    def get(self, tenant: str, now: float) -> float:
        used, at = self._used.get(tenant, (0.0, now))
        return used * exp((at - now) / DECAY_SECONDS)

    def snapshot(self, now: float) -> dict[str, float]:
        """What each tenant has used that has used anything to speak of."""
        found = {tenant: self.get(tenant, now) for tenant in self._used}
        return {tenant: used for tenant, used in found.items() if used >= MIN_TOKENS}

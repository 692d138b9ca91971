"""The service that each tenant has used in about the last minute. Pure."""

from math import exp

from dispatcher.estimate.ttl_set import MAX_MEMBERS

DECAY_SECONDS = 60.0  # usage fades by 1/e in this time
MIN_TOKENS = 1.0  # virtual tokens; a tenant that has used less is forgotten


class RecentUsage:
    """Service by tenant, in virtual tokens, of requests that ended in about the last minute.

    Times are seconds of any monotonic clock, given by the caller.
    """

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}  # virtual tokens, as of when

    def add(self, tenant: str, service: float, now: float) -> None:
        """Add the service of a request that has ended."""
        self._used[tenant] = self.get(tenant, now) + service, now
        if len(self._used) > MAX_MEMBERS:
            self._used = {t: u for t, u in self._used.items() if self.get(t, now) >= MIN_TOKENS}

    def get(self, tenant: str, now: float) -> float:
        """A tenant's service so far, faded until `now`; 0 for an unknown tenant."""
        used, at = self._used.get(tenant, (0.0, now))
        return used * exp((at - now) / DECAY_SECONDS)

    def snapshot(self, now: float) -> dict[str, float]:
        """The service of every tenant that has used at least `MIN_TOKENS`."""
        found = {tenant: self.get(tenant, now) for tenant in self._used}
        return {tenant: used for tenant, used in found.items() if used >= MIN_TOKENS}

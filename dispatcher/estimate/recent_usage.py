"""The service that each tenant has used in about the last minute. Pure."""

from math import exp

from dispatcher.estimate.ttl_set import MAX_MEMBERS

DECAY_SECONDS = 60.0  # usage fades by 1/e in this time
MIN_TOKENS = 1.0  # virtual tokens; a tenant that has used less is forgotten


class RecentUsage:
    """Service that each tenant has used in about the last minute, counted when its requests end.

    Service is in virtual tokens: prompt tokens plus twice the generated tokens. A tenant's sum
    fades by 1/e in `DECAY_SECONDS` (60 s). Times are seconds of any one monotonic clock, given by
    the caller.
    """

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}  # virtual tokens, as of when

    def add(self, tenant: str, service: float, now: float) -> None:
        """Add the service, in virtual tokens, of a tenant's request that has ended at `now`."""
        self._used[tenant] = self.get(tenant, now) + service, now
        if len(self._used) > MAX_MEMBERS:
            self._used = {t: u for t, u in self._used.items() if self.get(t, now) >= MIN_TOKENS}

    def get(self, tenant: str, now: float) -> float:
        """Return a tenant's service in virtual tokens, faded until `now`; 0 if it is unknown."""
        used, at = self._used.get(tenant, (0.0, now))
        return used * exp((at - now) / DECAY_SECONDS)

    def snapshot(self, now: float) -> dict[str, float]:
        """Return the service of each tenant in virtual tokens, faded until `now`, by tenant.

        Tenants with less than one virtual token (`MIN_TOKENS`) are left out; empty if there are no
        others.
        """
        found = {tenant: self.get(tenant, now) for tenant in self._used}
        return {tenant: used for tenant, used in found.items() if used >= MIN_TOKENS}

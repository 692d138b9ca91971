"""Who is connected here: how many connections each tenant and key has, and how fast they may send.

These bounds protect one gateway, so each keeps its own count; quotas hold over all of them. Pure.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.server.rate_limiter import RateLimiter
from registry.tenant_records import ApiKey, Tenant
from streams.errors import TooManyConnections

FRAME_BYTES = 4096  # to read so many takes 0.1 ms at worst, to submit a request takes more


def frame_cost(size: int) -> int:
    """As how many frames one of so many bytes counts."""
    return 1 + size // FRAME_BYTES


@dataclass
class _ConnectionOwner:
    """The connections of one tenant, or of one of its keys."""

    name: str
    rate_limiter: RateLimiter | None = None
    connections: int = 0

    def update_limits(self, bounds: Tenant | ApiKey) -> None:
        """Take over the bounds as they are now; raises `TooManyConnections`."""
        most, per_second = bounds.max_connections, bounds.frames_per_second
        if most is not None and self.connections >= most:
            raise TooManyConnections(self.name, most)
        if per_second is None:
            self.rate_limiter = None
        elif self.rate_limiter is None:
            self.rate_limiter = RateLimiter(per_second)
        else:
            self.rate_limiter.set_rate(per_second)


class FrameRateLimiter:
    """One connection; it shares its paces with the others of its tenant, and of its key."""

    def __init__(self, parties: list[_ConnectionOwner]) -> None:
        self._owners = parties

    def reserve(self, now: float, frames: int = 1) -> float:
        """Count so many frames; returns the seconds for which it must wait, mostly 0."""
        paces = (party.rate_limiter for party in self._owners)
        return max((pace.reserve(now, frames) for pace in paces if pace), default=0.0)


class ConnectionLimits:
    """All connections of this gateway whose credential is known."""

    def __init__(self) -> None:
        self._owners: dict[str, _ConnectionOwner] = {}

    def __len__(self) -> int:
        """How many tenants and keys are connected."""
        return len(self._owners)

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[FrameRateLimiter]:
        """One more connection, until the block ends; raises `TooManyConnections`."""
        bounds: list[Tenant | ApiKey] = [tenant, tenant.key] if tenant.key else [tenant]
        parties = [self._find_owner(_owner_name(tenant, each)) for each in bounds]
        for party, each in zip(parties, bounds, strict=True):
            party.update_limits(each)
        for party in parties:
            self._owners[party.name] = party
            party.connections += 1
        try:
            yield FrameRateLimiter(parties)
        finally:
            for party in parties:
                self._remove_connection(party)

    def _find_owner(self, whose: str) -> _ConnectionOwner:
        return self._owners.get(whose) or _ConnectionOwner(whose)

    def _remove_connection(self, party: _ConnectionOwner) -> None:
        party.connections -= 1
        if not party.connections:
            del self._owners[party.name]


def _owner_name(tenant: Tenant, bounds: Tenant | ApiKey) -> str:
    if isinstance(bounds, ApiKey):
        return f"the key {bounds.name!r} of tenant {tenant.name!r}"
    return f"tenant {tenant.name!r}"

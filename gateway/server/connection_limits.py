"""Connection limits: how many connections a tenant and a key may have, and how fast they may send.

These limits protect one gateway, so each gateway keeps its own count, unlike quotas. Pure.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from api.rate_limiter import RateLimiter
from registry.tenant_records import ApiKey, Tenant
from streams.errors import TooManyConnections

FRAME_BYTES = 4096  # reading these takes 0.1 ms at worst; submitting a request takes more


def frame_cost(size: int) -> int:
    """Return how many frames a message of `size` bytes counts as: one, plus one per whole 4 KiB."""
    return 1 + size // FRAME_BYTES


@dataclass
class _ConnectionOwner:
    """The connections of one tenant, or of one of its keys."""

    name: str
    rate_limiter: RateLimiter | None = None
    connections: int = 0

    def update_limits(self, limited: Tenant | ApiKey) -> None:
        """Take over the limits as they are now; raises `TooManyConnections` if they are reached."""
        max_connections, per_second = limited.max_connections, limited.frames_per_second
        if max_connections is not None and self.connections >= max_connections:
            raise TooManyConnections(self.name, max_connections)
        if per_second is None:
            self.rate_limiter = None
        elif self.rate_limiter is None:
            self.rate_limiter = RateLimiter(per_second)
        else:
            self.rate_limiter.set_rate(per_second)


class FrameRateLimiter:
    """The limit on the rate of frames of one connection.

    The rate is counted together with the other connections of the same tenant and of the same API
    key at this gateway.
    """

    def __init__(self, owners: list[_ConnectionOwner]) -> None:
        self._owners = owners

    def reserve(self, now: float, frames: int = 1) -> float:
        """Count `frames`, and return for how many seconds the connection must not read on.

        0 means no wait; it is 0 too if neither tenant nor key has a limit. `now` is in seconds of
        any one clock. This does not wait itself.
        """
        limiters = (owner.rate_limiter for owner in self._owners)
        return max((limiter.reserve(now, frames) for limiter in limiters if limiter), default=0.0)


class ConnectionLimits:
    """Counts the authenticated connections of this gateway, by tenant and by API key."""

    def __init__(self) -> None:
        self._owners: dict[str, _ConnectionOwner] = {}

    def __len__(self) -> int:
        """Return the number of tenants and keys that are connected."""
        return len(self._owners)

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[FrameRateLimiter]:
        """Count one connection of a tenant and its API key for the time of the `with` block.

        Yields the limiter of its frame rate. Raises `TooManyConnections` if tenant or key has as
        many connections here as it may have; then nothing is counted.
        """
        limited: list[Tenant | ApiKey] = [tenant]
        if tenant.key and tenant.key.has_connection_limits:
            limited.append(tenant.key)
        owners = [self._find_owner(_owner_name(tenant, each)) for each in limited]
        for owner, each in zip(owners, limited, strict=True):
            owner.update_limits(each)
        for owner in owners:
            self._owners[owner.name] = owner
            owner.connections += 1
        try:
            yield FrameRateLimiter(owners)
        finally:
            for owner in owners:
                self._remove_connection(owner)

    def _find_owner(self, name: str) -> _ConnectionOwner:
        return self._owners.get(name) or _ConnectionOwner(name)

    def _remove_connection(self, owner: _ConnectionOwner) -> None:
        owner.connections -= 1
        if not owner.connections:
            del self._owners[owner.name]


def _owner_name(tenant: Tenant, limited: Tenant | ApiKey) -> str:
    if isinstance(limited, ApiKey):
        return f"the key {limited.name!r} of tenant {tenant.name!r}"
    return f"tenant {tenant.name!r}"

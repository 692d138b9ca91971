"""Who is connected here: how many connections each tenant and key has, and how fast they may send.

These bounds protect one gateway, so each keeps its own count; quotas hold over all of them. Pure.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.pace import Pace
from registry.tenants import KeyHolder, Tenant
from streams.errors import TooManyConnections

FRAME_BYTES = 4096  # to read so many takes 0.1 ms at worst, to submit a request takes more


def frames_in(size: int) -> int:
    """As how many frames one of so many bytes counts."""
    return 1 + size // FRAME_BYTES


@dataclass
class _Party:
    """The connections of one tenant, or of one of its keys."""

    whose: str
    pace: Pace | None = None
    connections: int = 0

    def check(self, bounds: Tenant | KeyHolder) -> None:
        """Take over the bounds as they are now; raises `TooManyConnections`."""
        most, per_second = bounds.max_connections, bounds.frames_per_second
        if most is not None and self.connections >= most:
            raise TooManyConnections(self.whose, most)
        if per_second is None:
            self.pace = None
        elif self.pace is None:
            self.pace = Pace(per_second)
        else:
            self.pace.set(per_second)


class Guest:
    """One connection; it shares its paces with the others of its tenant, and of its key."""

    def __init__(self, parties: list[_Party]) -> None:
        self._parties = parties

    def take(self, now: float, frames: int = 1) -> float:
        """Count so many frames; returns the seconds for which it must wait, mostly 0."""
        paces = (party.pace for party in self._parties)
        return max((pace.take(now, frames) for pace in paces if pace), default=0.0)


class Guests:
    """All connections of this gateway whose credential is known."""

    def __init__(self) -> None:
        self._parties: dict[str, _Party] = {}

    def __len__(self) -> int:
        """How many tenants and keys are connected."""
        return len(self._parties)

    @contextmanager
    def admitted(self, tenant: Tenant) -> Iterator[Guest]:
        """One more connection, until the block ends; raises `TooManyConnections`."""
        bounds: list[Tenant | KeyHolder] = [tenant, tenant.key] if tenant.key else [tenant]
        parties = [self._party(_whose(tenant, each)) for each in bounds]
        for party, each in zip(parties, bounds, strict=True):
            party.check(each)
        for party in parties:
            self._parties[party.whose] = party
            party.connections += 1
        try:
            yield Guest(parties)
        finally:
            for party in parties:
                self._leave(party)

    def _party(self, whose: str) -> _Party:
        return self._parties.get(whose) or _Party(whose)

    def _leave(self, party: _Party) -> None:
        party.connections -= 1
        if not party.connections:
            del self._parties[party.whose]


def _whose(tenant: Tenant, bounds: Tenant | KeyHolder) -> str:
    if isinstance(bounds, KeyHolder):
        return f"the key {bounds.name!r} of tenant {tenant.name!r}"
    return f"tenant {tenant.name!r}"

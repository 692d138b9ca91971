"""Which tenants have metrics of their own: those of most use, so that labels stay few. Pure."""

from collections.abc import Callable
from heapq import nlargest

MAX_TENANTS = 20
OTHER = "other"
RANK_SECONDS = 300.0
TAKEOVER_RATIO = 1.5  # times the use of whose label is taken: of two that are alike one keeps it


class TenantLabels:
    """The first tenants are named, later those who use most; the rest are `other`.

    `forget` is called with a tenant that is named no more. What was used counts half after each
    look. Times are in seconds of any one clock.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._on_unnamed = forget
        self._named: set[str] = set()
        self._used: dict[str, float] = {}
        self._rank_at = 0.0

    def label_for(self, tenant: str) -> str:
        """Its label of the moment."""
        if tenant not in self._named and len(self._named) < MAX_TENANTS:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHER

    def record_use(self, tenant: str, tokens: float, now: float) -> None:
        """It has used so many."""
        self.label_for(tenant)  # a free place is its own
        self._used[tenant] = self._used.get(tenant, 0.0) + tokens
        if now >= self._rank_at:
            self._rank_at = now + RANK_SECONDS
            self._reassign_labels()
            self._used = {name: used / 2 for name, used in self._used.items() if used > 1}

    def _reassign_labels(self) -> None:
        """Give labels of those who use least to those who use most."""
        used = self._used
        least = sorted(self._named, key=lambda name: used.get(name, 0.0))
        others = used.keys() - self._named
        most = nlargest(MAX_TENANTS, others, key=lambda name: used[name])
        for old, new in zip(least, most, strict=False):
            if used[new] <= TAKEOVER_RATIO * used.get(old, 0.0):
                return
            self._named.remove(old)
            self._named.add(new)
            self._on_unnamed(old)

"""Tenant labels of metrics: the tenants that use most have their own, so labels stay few. Pure."""

from collections.abc import Callable
from heapq import nlargest

from streams.subjects import OTHER

MAX_TENANTS = 20
RANK_SECONDS = 300.0
TAKEOVER_RATIO = 1.5  # times the use of the tenant that loses its label: near equals do not swap


class TenantLabels:
    """Chooses each tenant's label in metrics: its own name, or `_other`, so that labels stay few.

    No tenant can be called `_other`: names begin with a letter or a digit. The first 20 tenants
    have their names. Every `RANK_SECONDS`, tenants that used much more take over the labels of
    those that used least; past use counts half from one ranking to the next. `on_unnamed` is called
    with each tenant that has lost its label. Times are in seconds of any one clock.
    """

    def __init__(self, on_unnamed: Callable[[str], None]) -> None:
        self._on_unnamed = on_unnamed
        self._named: set[str] = set()
        self._used: dict[str, float] = {}
        self._rank_at = 0.0

    def label_for(self, tenant: str) -> str:
        """Return the tenant's label now: its name, or `_other`.

        A tenant that is new here gets its name while fewer than 20 tenants have theirs.
        """
        if tenant not in self._named and len(self._named) < MAX_TENANTS:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHER

    def record_use(self, tenant: str, tokens: float, now: float) -> None:
        """Add `tokens` to the tenant's use; rank all tenants again if that is due at `now`."""
        self.label_for(tenant)  # takes a free label
        self._used[tenant] = self._used.get(tenant, 0.0) + tokens
        if now >= self._rank_at:
            self._rank_at = now + RANK_SECONDS
            self._reassign_labels()
            self._used = {name: used / 2 for name, used in self._used.items() if used > 1}

    def _reassign_labels(self) -> None:
        """Give the labels of tenants that use least to those that use most."""
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

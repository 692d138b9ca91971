"""Thresholds of quotas: that a half, four fifths or all of one is used, told once. Pure."""

from dataclasses import dataclass

from streams import subjects
from streams.records.webhooks.events import EventType, encode_event

THRESHOLD_PERCENTS = (50, 80, 100)


@dataclass(frozen=True)
class QuotaThreshold:
    """A part of a quota that is used or reserved, in one day or month of UTC.

    `scope` is the tenant itself or one of its keys, as in the counters' subjects, `quota` such as
    `tokens_per_day`, `period` such as `2026-11-21`. `limit` and `used` are in tokens, or in 10⁻¹²
    of the currency.
    """

    tenant: str
    scope: str
    quota: str
    period: str
    percent: int
    limit: int
    used: int

    @property
    def subject(self) -> str:
        """The subject on which it is stored; there is one for each threshold and period."""
        return subjects.threshold(self.tenant, self.scope, self.quota, self.period, self.percent)

    def encode(self, now: float) -> bytes:
        """Return the event as JSON in the shape that webhooks have; `now` is in epoch seconds.

        Its id is the same for whoever makes it.
        """
        return encode_event(self.subject, EventType.THRESHOLD_REACHED, vars(self), now)

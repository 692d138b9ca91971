"""Sums of usage and of costs, and the days that they are told for. Pure.

`UsageSums` is what tenants used, `CostSums` what workers cost.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from operator import itemgetter
from typing import Any, NamedTuple, Self

from streams import quota_windows
from streams.messages import LedgerRecord
from streams.records.cost_sums import CostSums
from streams.usage_accounts import format_amount

MAX_DAYS = 92


@dataclass(frozen=True)
class UsageSums:
    """Sums over requests; tokens as billed, `charge` in 10⁻¹² of the currency."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens
    completion_tokens: int = 0
    charge: int = 0

    @classmethod
    def of(cls, record: LedgerRecord) -> Self:
        """Return the sums of one request."""
        prompt, completion, cached = record.billed_tokens
        return cls(1, prompt, cached, completion, record.charge)

    def __add__(self, other: "UsageSums") -> "UsageSums":
        return UsageSums(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.charge + other.charge,
        )


class CostRow(NamedTuple):
    """Cost of workers of one type for one model on one day of UTC, in one currency."""

    day: str
    model: str
    type: str
    currency: str
    sums: CostSums


class UsageRow(NamedTuple):
    """Sums of one key of a tenant, one model, one day of UTC and one currency."""

    day: str
    model: str
    key: str
    currency: str
    sums: UsageSums


def list_days(start: str, end: str) -> list[str]:
    """Return the days of UTC from `start` to `end`, both included and written as `2026-11-28`.

    Raises ValueError for another form, for an end before the start, and for more than `MAX_DAYS`.
    """
    first, last = _parse_day(start), _parse_day(end)
    count = (last - first).days + 1
    if not 1 <= count <= MAX_DAYS:
        raise ValueError(f"from {start} to {end} are {count} days, not 1 to {MAX_DAYS}")
    return [(first + timedelta(number)).isoformat() for number in range(count)]


def _parse_day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no day: write 2026-11-28") from None


def recent_days(now: float) -> tuple[str, str]:
    """Return the first and the last of the 30 days of UTC that end with today."""
    start = quota_windows.utc_day(now - 29 * quota_windows.DAY_SECONDS)
    return start, quota_windows.utc_day(now)


def add_up(rows: Iterable[UsageRow], by: str) -> list[dict[str, Any]]:
    """Return the sums of `rows` by `day`, `model` or `key`, and by currency, in order.

    Each result has the name by which it was added, the currency, the fields of `UsageSums`, and the
    charge as `amount`, in the currency itself and exact: text, since it is above what a JSON number
    holds in some languages.
    """
    sums = defaultdict[tuple[str, str], UsageSums](UsageSums)
    for row in rows:
        sums[getattr(row, by), row.currency] += row.sums
    return [
        {by: name, "currency": currency, **vars(found), "amount": format_amount(found.charge)}
        for (name, currency), found in sorted(sums.items(), key=lambda item: item[0])
    ]


def add_up_costs(rows: Iterable[CostRow], by: str) -> list[dict[str, Any]]:
    """Return the sums of `rows` by `day` or `model`, and by worker type and currency, in order."""
    sums = defaultdict[tuple[str, str, str], CostSums](CostSums)
    for row in rows:
        sums[getattr(row, by), row.type, row.currency] += row.sums
    return [
        {by: name, "type": kind, "currency": currency, **found.to_json()}
        for (name, kind, currency), found in sorted(sums.items(), key=itemgetter(0))
    ]

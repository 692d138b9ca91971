"""Quotas as checks: what a request adds to which counters, and what their totals say. Pure.

`adds` are increments by subject; those by nothing only read. `refusal` gets the new totals. A total
has everything that was added before, so of racing requests never more come in than there is room
for; near the limit one may be refused because of a rival that is refused as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from registry.tenant_records import QuotaLimits, Tenant
from streams import quota_windows, subjects
from streams.errors import LargerThanQuota, QuotaSpent, RateLimited
from streams.quota_windows import QuotaWindow
from streams.usage_accounts import PICO, TENANT_SCOPE, Account, Meter, Price, key_scope

CONCURRENCY_RETRY_SECONDS = 1.0  # nobody knows when a request will end
Totals = Mapping[str, int]


@dataclass(frozen=True)
class RequestAmounts:
    """What one request may come to: all of its prompt, and the most it may generate."""

    prompt_tokens: int
    completion_tokens: int
    price: Price

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def spend(self) -> int:
        """In picos of the currency."""
        return self.price.spend_for(self.prompt_tokens, self.completion_tokens)


@dataclass(frozen=True)
class QuotaScope:
    """A tenant, or one of its keys, with quotas."""

    tenant: str
    name: str
    limits: QuotaLimits = field(compare=False)

    def rate_subject(self, meter: Meter, slot: int) -> str:
        return subjects.rate(self.tenant, self.name, meter, slot)

    def usage_subject(self, meter: Meter, day: str) -> str:
        return subjects.usage(self.tenant, self.name, meter, day)

    @property
    def has_daily_quota(self) -> bool:
        return self.limits.tokens_per_day is not None or self.limits.spend_per_day is not None


def quota_scopes(tenant: Tenant) -> list[QuotaScope]:
    """Whose quotas a request must meet: the tenant's, and those of the key that it came with."""
    found = [QuotaScope(tenant.name, TENANT_SCOPE, tenant)]
    if tenant.key:
        found.append(QuotaScope(tenant.name, key_scope(tenant.key.name), tenant.key))
    return [scope for scope in found if scope.limits.has_limits]


@dataclass(frozen=True)
class PerMinuteCheck:
    """So much in a minute that slides."""

    scope: QuotaScope
    meter: Meter
    limit: int
    amount: int

    def increments(self, now: float) -> dict[str, int]:
        current, previous = self._subjects(now)
        return {current: self.amount, previous: 0}

    def read_window(self, totals: Totals, now: float) -> QuotaWindow:
        """The use with this request in it."""
        current, previous = self._subjects(now)
        return QuotaWindow(totals[previous], totals[current], now)

    def find_refusal(self, totals: Totals, now: float) -> RateLimited | None:
        window = self.read_window(totals, now).without(self.amount)
        wait = window.seconds_until_fits(self.amount, self.limit, now)
        if not wait:
            return None
        return RateLimited(f"{self.meter}_per_minute", self.limit, round(window.used_at(now)), wait)

    def _subjects(self, now: float) -> tuple[str, str]:
        slot = quota_windows.minute_number(now)
        return self.scope.rate_subject(self.meter, slot), self.scope.rate_subject(
            self.meter, slot - 1
        )


@dataclass(frozen=True)
class ConcurrencyCheck:
    """So many requests that have not ended; counted in each lease that they may live in."""

    scope: QuotaScope
    limit: int

    def increments(self, now: float) -> dict[str, int]:
        return {
            self.scope.rate_subject(Meter.OPEN, lease): 1 for lease in quota_windows.open_slots(now)
        }

    def find_refusal(self, totals: Totals, now: float) -> RateLimited | None:
        most = max(totals[subject] for subject in self.increments(now))
        if most <= self.limit:
            return None
        return RateLimited("max_concurrent", self.limit, most - 1, CONCURRENCY_RETRY_SECONDS)


@dataclass(frozen=True)
class DailyCheck:
    """So much in a day of UTC; what is reserved there is settled with the ledger.

    `unit` is how much of what is counted makes one of what the quota is written in.
    """

    scope: QuotaScope
    meter: Meter
    limit: float
    amount: int
    unit: int = 1

    def increments(self, now: float) -> dict[str, int]:
        return {self.scope.usage_subject(self.meter, quota_windows.utc_day(now)): self.amount}

    def find_refusal(self, totals: Totals, now: float) -> QuotaSpent | None:
        (total,) = (totals[subject] for subject in self.increments(now))
        if total <= self.limit * self.unit:
            return None
        used = (total - self.amount) / self.unit
        return QuotaSpent(
            f"{self.meter}_per_day", self.limit, used, quota_windows.seconds_until_tomorrow(now)
        )


QuotaCheck = PerMinuteCheck | ConcurrencyCheck | DailyCheck


def build_account(
    scopes: Sequence[QuotaScope], amounts: RequestAmounts, now: float
) -> Account | None:
    """Where a request's use of the day is counted, if any scope bounds it."""
    daily = [scope for scope in scopes if scope.has_daily_quota]
    if not daily:
        return None
    names, day = tuple(scope.name for scope in daily), quota_windows.utc_day(now)
    return Account(daily[0].tenant, names, day, amounts.tokens, amounts.spend, amounts.price)


def build_checks(scope: QuotaScope, amounts: RequestAmounts) -> Iterator[QuotaCheck]:
    """Every quota of a scope. Raises `LargerThanQuota` if the request can never meet one."""
    limits = scope.limits
    if limits.requests_per_minute is not None:
        yield PerMinuteCheck(scope, Meter.REQUESTS, limits.requests_per_minute, 1)
    if limits.tokens_per_minute is not None:
        _check_fits("tokens_per_minute", limits.tokens_per_minute, amounts.tokens)
        yield PerMinuteCheck(scope, Meter.TOKENS, limits.tokens_per_minute, amounts.tokens)
    if limits.max_concurrent is not None:
        yield ConcurrencyCheck(scope, limits.max_concurrent)
    if limits.tokens_per_day is not None:
        _check_fits("tokens_per_day", limits.tokens_per_day, amounts.tokens)
        yield DailyCheck(scope, Meter.TOKENS, limits.tokens_per_day, amounts.tokens)
    if limits.spend_per_day is not None:
        _check_fits("spend_per_day", limits.spend_per_day, amounts.spend / PICO)
        yield DailyCheck(scope, Meter.SPEND, limits.spend_per_day, amounts.spend, PICO)


def _check_fits(quota: str, limit: float, amount: float) -> None:
    if amount > limit:
        raise LargerThanQuota(quota, limit, amount)

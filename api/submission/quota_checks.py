"""Quota checks: what a request adds to which counters, and whether their totals refuse it. Pure.

`increments` maps counter subjects to what is added; an increment of 0 only reads. `find_refusal`
gets the new totals. A total includes everything that was added before, so racing requests never
exceed a limit together; near the limit one may be refused because of a rival that is refused too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from registry.tenant_records import QuotaLimits, Tenant
from streams import quota_windows, subjects
from streams.errors import LargerThanQuota, QuotaSpent, RateLimited
from streams.quota_windows import QuotaWindow
from streams.usage_accounts import PICO, TENANT_SCOPE, Account, Meter, Price, key_scope

CONCURRENCY_RETRY_SECONDS = 1.0  # a guess: it is not known when a request will end
Totals = Mapping[str, int]


@dataclass(frozen=True)
class RequestAmounts:
    """The most that one request may use: all of its prompt, and all that it may generate."""

    prompt_tokens: int
    completion_tokens: int
    price: Price

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def spend(self) -> int:
        """The price of all tokens, in picos (10^-12) of the currency."""
        return self.price.spend_for(self.prompt_tokens, self.completion_tokens)


@dataclass(frozen=True)
class QuotaScope:
    """A tenant, or one of its keys, with quotas."""

    tenant: str
    name: str
    limits: QuotaLimits = field(compare=False)

    def rate_subject(self, meter: Meter, slot: int) -> str:
        """Return the subject of this scope's counter for a minute, or for a lease."""
        return subjects.rate(self.tenant, self.name, meter, slot)

    def usage_subject(self, meter: Meter, day: str) -> str:
        """Return the subject of this scope's counter for a day of UTC."""
        return subjects.usage(self.tenant, self.name, meter, day)

    @property
    def has_daily_quota(self) -> bool:
        """True if tokens or spend per day are limited."""
        return self.limits.tokens_per_day is not None or self.limits.spend_per_day is not None


def quota_scopes(tenant: Tenant) -> list[QuotaScope]:
    """Return the scopes whose quotas a request must meet: its tenant and its key, if limited."""
    scopes = [QuotaScope(tenant.name, TENANT_SCOPE, tenant)]
    if tenant.key:
        scopes.append(QuotaScope(tenant.name, key_scope(tenant.key.name), tenant.key))
    return [scope for scope in scopes if scope.limits.has_limits]


@dataclass(frozen=True)
class PerMinuteCheck:
    """A limit of requests or tokens in a sliding minute."""

    scope: QuotaScope
    meter: Meter
    limit: int
    amount: int

    def increments(self, now: float) -> dict[str, int]:
        """Return what the request adds, by counter subject; the minute before is only read."""
        current, previous = self._subjects(now)
        return {current: self.amount, previous: 0}

    def read_window(self, totals: Totals, now: float) -> QuotaWindow:
        """Return the use of the minute, this request included."""
        current, previous = self._subjects(now)
        return QuotaWindow(totals[previous], totals[current], now)

    def find_refusal(self, totals: Totals, now: float) -> RateLimited | None:
        """Return the refusal that the new totals give, if they exceed the limit."""
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
    """A limit of requests that have not ended; each lease in which one may live counts it."""

    scope: QuotaScope
    limit: int

    def increments(self, now: float) -> dict[str, int]:
        """Return what the request adds, by counter subject: 1 in each current lease."""
        return {
            self.scope.rate_subject(Meter.OPEN, lease): 1 for lease in quota_windows.open_slots(now)
        }

    def find_refusal(self, totals: Totals, now: float) -> RateLimited | None:
        """Return the refusal that the new totals give, if they exceed the limit."""
        highest = max(totals[subject] for subject in self.increments(now))
        if highest <= self.limit:
            return None
        return RateLimited("max_concurrent", self.limit, highest - 1, CONCURRENCY_RETRY_SECONDS)


@dataclass(frozen=True)
class DailyCheck:
    """A limit of tokens or spend in a day of UTC; reservations are settled with the ledger.

    `limit` is in the quota's own unit; `amount` and the counters are in parts of which `unit` make
    one of it.
    """

    scope: QuotaScope
    meter: Meter
    limit: float
    amount: int
    unit: int = 1

    def increments(self, now: float) -> dict[str, int]:
        """Return what the request adds, by counter subject."""
        return {self.scope.usage_subject(self.meter, quota_windows.utc_day(now)): self.amount}

    def find_refusal(self, totals: Totals, now: float) -> QuotaSpent | None:
        """Return the refusal that the new totals give, if they exceed the limit."""
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
    """Return the account of a request's use of the day; None if no scope has a daily quota."""
    daily = [scope for scope in scopes if scope.has_daily_quota]
    if not daily:
        return None
    names, day = tuple(scope.name for scope in daily), quota_windows.utc_day(now)
    return Account(daily[0].tenant, names, day, amounts.tokens, amounts.spend, amounts.price)


def build_checks(scope: QuotaScope, amounts: RequestAmounts) -> Iterator[QuotaCheck]:
    """Yield a check for each quota of a scope.

    Raises `LargerThanQuota` if the request alone exceeds a quota, and so can never meet it.
    """
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

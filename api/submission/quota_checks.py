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
    """The most that one request may use: its whole prompt and all tokens that it may generate."""

    prompt_tokens: int
    completion_tokens: int
    price: Price

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def spend(self) -> int:
        """The price of all these tokens, in 10^-12 of the currency."""
        return self.price.spend_for(self.prompt_tokens, self.completion_tokens)


@dataclass(frozen=True)
class QuotaScope:
    """A tenant or one of its API keys, with its quotas; each has counters of its own."""

    tenant: str
    name: str
    limits: QuotaLimits = field(compare=False)

    def rate_subject(self, meter: Meter, slot: int) -> str:
        """Return the NATS subject of this scope's counter of `meter` for one short period.

        `slot` is the number of a minute, or of a six-second lease for the meter of open requests.
        """
        return subjects.rate(self.tenant, self.name, meter, slot)

    def usage_subject(self, meter: Meter, day: str) -> str:
        """Return the NATS subject of this scope's counter of `meter` for a day.

        `day` is a day of UTC, as `2026-11-21`.
        """
        return subjects.usage(self.tenant, self.name, meter, day)

    @property
    def has_daily_quota(self) -> bool:
        """True if this scope limits tokens or spend per day."""
        return self.limits.tokens_per_day is not None or self.limits.spend_per_day is not None


def quota_scopes(tenant: Tenant) -> list[QuotaScope]:
    """Return the tenant and the API key used, as scopes, as far as each has quotas.

    A request must meet the quotas of all of them. Empty if neither has any.
    """
    scopes = [QuotaScope(tenant.name, TENANT_SCOPE, tenant)]
    if tenant.key:
        scopes.append(QuotaScope(tenant.name, key_scope(tenant.key.name), tenant.key))
    return [scope for scope in scopes if scope.limits.has_limits]


@dataclass(frozen=True)
class PerMinuteCheck:
    """A limit of requests or tokens in the last 60 seconds, and what one request adds."""

    scope: QuotaScope
    meter: Meter
    limit: int
    amount: int

    def increments(self, now: float) -> dict[str, int]:
        """Return the amounts that the request adds at `now` (epoch seconds), by counter subject.

        The counter of the minute before has an amount of 0: it is only read.
        """
        current, previous = self._subjects(now)
        return {current: self.amount, previous: 0}

    def read_window(self, totals: Totals, now: float) -> QuotaWindow:
        """Return the use of the last 60 seconds at `now` (epoch seconds), this request included.

        `totals` has the counters' values after the increments were added.
        """
        current, previous = self._subjects(now)
        return QuotaWindow(totals[previous], totals[current], now)

    def find_refusal(self, totals: Totals, now: float) -> RateLimited | None:
        """Return the error to raise if the request exceeds the limit; None if it is within.

        `totals` has the counters' values after the increments were added at `now` (epoch seconds).
        The error says after how many seconds the request would fit.
        """
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
    """A limit of requests that are open, that is, accepted or being submitted and not ended.

    Open requests are counted in leases, counters of six seconds each; a request counts in each
    lease that is current while it is open.
    """

    scope: QuotaScope
    limit: int

    def increments(self, now: float) -> dict[str, int]:
        """Return the amounts that the request adds, by counter subject: 1 in each current lease.

        `now` is in epoch seconds. There are one or two current leases, since they overlap.
        """
        return {
            self.scope.rate_subject(Meter.OPEN, lease): 1 for lease in quota_windows.open_slots(now)
        }

    def find_refusal(self, totals: Totals, now: float) -> RateLimited | None:
        """Return the error to raise if more requests are open than allowed; None otherwise.

        `totals` has the counters' values after the increments were added at `now` (epoch seconds).
        The highest one counts.
        """
        highest = max(totals[subject] for subject in self.increments(now))
        if highest <= self.limit:
            return None
        return RateLimited("max_concurrent", self.limit, highest - 1, CONCURRENCY_RETRY_SECONDS)


@dataclass(frozen=True)
class DailyCheck:
    """A limit of tokens or spend in a day of UTC, and what one request reserves of it.

    What the request did not use is given back when its ledger record is written. `limit` is in the
    quota's own unit; `amount` and the counters are in a smaller one, of which `unit` make one
    (10^12 for spend, 1 for tokens).
    """

    scope: QuotaScope
    meter: Meter
    limit: float
    amount: int
    unit: int = 1

    def increments(self, now: float) -> dict[str, int]:
        """Return the amount that the request adds, by counter subject; `now` is epoch seconds."""
        return {self.scope.usage_subject(self.meter, quota_windows.utc_day(now)): self.amount}

    def find_refusal(self, totals: Totals, now: float) -> QuotaSpent | None:
        """Return the error to raise if the request exceeds the day's limit; None if it is within.

        `totals` has the counters' values after the increments were added at `now` (epoch seconds).
        The error's retry time is the seconds until the next day of UTC.
        """
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
    """Return what a request reserves on the day's counters; None if no scope has a daily quota.

    `now`, in epoch seconds, decides the day.
    """
    daily = [scope for scope in scopes if scope.has_daily_quota]
    if not daily:
        return None
    names, day = tuple(scope.name for scope in daily), quota_windows.utc_day(now)
    return Account(daily[0].tenant, names, day, amounts.tokens, amounts.spend, amounts.price)


def build_checks(scope: QuotaScope, amounts: RequestAmounts) -> Iterator[QuotaCheck]:
    """Yield one check for each quota of a scope.

    Raises `LargerThanQuota`, while it is iterated, if the request alone needs more than a whole
    quota and could therefore never be admitted.
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

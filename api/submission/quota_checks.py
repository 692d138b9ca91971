"""Quota checks: what a request adds to which counters, and whether their totals refuse it. Pure.

`increments` maps counter subjects to what is added; an increment of 0 only reads. `find_refusal`
gets the new totals. A total includes everything that was added before, so racing requests never
exceed a limit together; near the limit one may be refused because of a rival that is refused too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from registry.tenant_records import QuotaLimits, Tenant
from streams import quota_windows, subjects
from streams.errors import LargerThanQuota, QuotaSpent, RateLimited
from streams.quota_windows import QuotaPeriod, QuotaWindow
from streams.records.quota_thresholds import THRESHOLD_PERCENTS, QuotaThreshold
from streams.usage_accounts import PICO, TENANT_SCOPE, Account, Meter, Price, key_scope

_PERIOD_METERS = (Meter.TOKENS, Meter.SPEND)
_UNITS = {Meter.TOKENS: 1, Meter.SPEND: PICO}  # of a counter, for one of the quota
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

    def usage_subject(self, meter: Meter, period: str) -> str:
        """Return the NATS subject of this scope's counter of `meter` for a day or month.

        `period` is one of UTC, as `2026-11-21` or `2026-11`.
        """
        return subjects.usage(self.tenant, self.name, meter, period)

    @property
    def periods(self) -> list[QuotaPeriod]:
        """The periods in which this scope has quotas of tokens or spend, soft ones too."""
        return [
            period
            for period in QuotaPeriod
            if any(getattr(self.limits, f"{m}_per_{period}") is not None for m in _PERIOD_METERS)
        ]


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
class PeriodCheck:
    """A limit of tokens or spend in a day or month of UTC, and what one request reserves of it.

    What the request did not use is given back when its ledger record is written. `limit` and
    `amount` are in the counter's unit: tokens, or 10^-12 of the currency. A soft one refuses
    nothing.
    """

    scope: QuotaScope
    meter: Meter
    period: QuotaPeriod
    limit: int
    amount: int
    is_soft: bool = False

    @property
    def quota(self) -> str:
        """The quota's name, such as `tokens_per_day`."""
        return f"{self.meter}_per_{self.period}"

    @property
    def unit(self) -> int:
        """Number of the counter's units that make one of the quota's."""
        return _UNITS[self.meter]

    def increments(self, now: float) -> dict[str, int]:
        """Return the amount that the request adds, by counter subject; `now` is epoch seconds."""
        return {self.scope.usage_subject(self.meter, self.period.name_at(now)): self.amount}

    def find_refusal(self, totals: Totals, now: float) -> QuotaSpent | None:
        """Return the error to raise if the request exceeds the limit; None if it is within.

        `totals` has the counters' values after the increments were added at `now` (epoch seconds).
        The error tells when the next period of UTC begins.
        """
        total = self._total(totals, now)
        if self.is_soft or total <= self.limit:
            return None
        return QuotaSpent(
            self.quota,
            self.limit / self.unit,
            (total - self.amount) / self.unit,
            self.period.seconds_left(now),
            f"{self.period.end_after(now):%Y-%m-%dT%H:%M:%SZ}",
        )

    def find_thresholds(
        self, totals: Totals, now: float, *, is_admitted: bool
    ) -> list[QuotaThreshold]:
        """Return the thresholds that are reached by what is used and reserved.

        That has this request's part if it `is_admitted`. One that this limit refuses reaches the
        last threshold. `totals` and `now` are as for `find_refusal`.
        """
        refuses = self.find_refusal(totals, now) is not None
        used = self._total(totals, now) - (0 if is_admitted else self.amount)
        return [
            QuotaThreshold(
                self.scope.tenant,
                self.scope.name,
                self.quota,
                self.period.name_at(now),
                percent,
                self.limit,
                used,
            )
            for percent in THRESHOLD_PERCENTS
            if refuses or used * 100 >= self.limit * percent
        ]

    def _total(self, totals: Totals, now: float) -> int:
        (subject,) = self.increments(now)
        return totals[subject]


QuotaCheck = PerMinuteCheck | ConcurrencyCheck | PeriodCheck


def build_account(
    scopes: Sequence[QuotaScope], amounts: RequestAmounts, now: float
) -> Account | None:
    """Return what a request reserves on counters of the day and month; None without such quotas.

    Each scope that has any is counted in all periods in which one of them has. `now`, in epoch
    seconds, decides the day and the month.
    """
    counted = [scope for scope in scopes if scope.periods]
    if not counted:
        return None
    names = tuple(scope.name for scope in counted)
    used = {period for scope in counted for period in scope.periods}
    periods = tuple(period.name_at(now) for period in QuotaPeriod if period in used)
    return Account(counted[0].tenant, names, periods, amounts.tokens, amounts.spend, amounts.price)


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
    for period in scope.periods:
        yield from _build_period_checks(scope, period, amounts)


def _build_period_checks(
    scope: QuotaScope, period: QuotaPeriod, amounts: RequestAmounts
) -> Iterator[PeriodCheck]:
    wanted = {Meter.TOKENS: amounts.tokens, Meter.SPEND: amounts.spend}
    for meter, amount in wanted.items():
        quota, unit = f"{meter}_per_{period}", _UNITS[meter]
        if (size := getattr(scope.limits, quota)) is None:
            continue
        limit = int(Decimal(str(size)) * unit)  # exact: money is no binary fraction
        is_soft = not scope.limits.enforces(quota)
        if amount > limit and not is_soft:
            raise LargerThanQuota(quota, size, amount / unit)
        yield PeriodCheck(scope, meter, period, limit, amount, is_soft)


def _check_fits(quota: str, limit: float, amount: float) -> None:
    if amount > limit:
        raise LargerThanQuota(quota, limit, amount)

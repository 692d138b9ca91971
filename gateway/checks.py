"""Quotas as checks: what a request adds to which counters, and what their totals say. Pure.

`adds` are increments by subject; those by nothing only read. `refusal` gets the new totals. A total
has everything that was added before, so of racing requests never more come in than there is room
for; near the limit one may be refused because of a rival that is refused as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from registry.tenants import Limits, Tenant
from streams import subjects, windows
from streams.errors import LargerThanQuota, QuotaSpent, RateLimited
from streams.usage import PICO, TENANT, Account, Meter, Price, key_scope
from streams.windows import Window

CONCURRENCY_RETRY_SECONDS = 1.0  # nobody knows when a request will end
Totals = Mapping[str, int]


@dataclass(frozen=True)
class Amounts:
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
        return self.price.of(self.prompt_tokens, self.completion_tokens)


@dataclass(frozen=True)
class Scope:
    """A tenant, or one of its keys, with quotas."""

    tenant: str
    name: str
    limits: Limits = field(compare=False)

    def rate(self, meter: Meter, slot: int) -> str:
        return subjects.rate(self.tenant, self.name, meter, slot)

    def usage(self, meter: Meter, day: str) -> str:
        return subjects.usage(self.tenant, self.name, meter, day)

    @property
    def has_daily(self) -> bool:
        return self.limits.tokens_per_day is not None or self.limits.spend_per_day is not None


def scopes(tenant: Tenant) -> list[Scope]:
    """Whose quotas a request must meet: the tenant's, and those of the key that it came with."""
    found = [Scope(tenant.name, TENANT, tenant)]
    if tenant.key:
        found.append(Scope(tenant.name, key_scope(tenant.key.name), tenant.key))
    return [scope for scope in found if scope.limits.limited]


@dataclass(frozen=True)
class PerMinute:
    """So much in a minute that slides."""

    scope: Scope
    meter: Meter
    limit: int
    amount: int

    def adds(self, now: float) -> dict[str, int]:
        current, previous = self._subjects(now)
        return {current: self.amount, previous: 0}

    def window(self, totals: Totals, now: float) -> Window:
        """The use with this request in it."""
        current, previous = self._subjects(now)
        return Window(totals[previous], totals[current], now)

    def refusal(self, totals: Totals, now: float) -> RateLimited | None:
        window = self.window(totals, now).less(self.amount)
        wait = window.wait(self.amount, self.limit, now)
        if not wait:
            return None
        return RateLimited(f"{self.meter}_per_minute", self.limit, round(window.level(now)), wait)

    def _subjects(self, now: float) -> tuple[str, str]:
        slot = windows.minute(now)
        return self.scope.rate(self.meter, slot), self.scope.rate(self.meter, slot - 1)


@dataclass(frozen=True)
class Concurrent:
    """So many requests that have not ended; counted in each lease that they may live in."""

    scope: Scope
    limit: int

    def adds(self, now: float) -> dict[str, int]:
        return {self.scope.rate(Meter.OPEN, lease): 1 for lease in windows.leases(now)}

    def refusal(self, totals: Totals, now: float) -> RateLimited | None:
        most = max(totals[subject] for subject in self.adds(now))
        if most <= self.limit:
            return None
        return RateLimited("max_concurrent", self.limit, most - 1, CONCURRENCY_RETRY_SECONDS)


@dataclass(frozen=True)
class PerDay:
    """So much in a day of UTC; what is reserved there is settled with the ledger.

    `unit` is how much of what is counted makes one of what the quota is written in.
    """

    scope: Scope
    meter: Meter
    limit: float
    amount: int
    unit: int = 1

    def adds(self, now: float) -> dict[str, int]:
        return {self.scope.usage(self.meter, windows.day(now)): self.amount}

    def refusal(self, totals: Totals, now: float) -> QuotaSpent | None:
        (total,) = (totals[subject] for subject in self.adds(now))
        if total <= self.limit * self.unit:
            return None
        used = (total - self.amount) / self.unit
        return QuotaSpent(f"{self.meter}_per_day", self.limit, used, windows.until_tomorrow(now))


Check = PerMinute | Concurrent | PerDay


def account(scopes: Sequence[Scope], amounts: Amounts, now: float) -> Account | None:
    """Where a request's use of the day is counted, if any scope bounds it."""
    daily = [scope for scope in scopes if scope.has_daily]
    if not daily:
        return None
    names, day = tuple(scope.name for scope in daily), windows.day(now)
    return Account(daily[0].tenant, names, day, amounts.tokens, amounts.spend, amounts.price)


def checks(scope: Scope, amounts: Amounts) -> Iterator[Check]:
    """Every quota of a scope. Raises `LargerThanQuota` if the request can never meet one."""
    limits = scope.limits
    if limits.requests_per_minute is not None:
        yield PerMinute(scope, Meter.REQUESTS, limits.requests_per_minute, 1)
    if limits.tokens_per_minute is not None:
        _fits("tokens_per_minute", limits.tokens_per_minute, amounts.tokens)
        yield PerMinute(scope, Meter.TOKENS, limits.tokens_per_minute, amounts.tokens)
    if limits.max_concurrent is not None:
        yield Concurrent(scope, limits.max_concurrent)
    if limits.tokens_per_day is not None:
        _fits("tokens_per_day", limits.tokens_per_day, amounts.tokens)
        yield PerDay(scope, Meter.TOKENS, limits.tokens_per_day, amounts.tokens)
    if limits.spend_per_day is not None:
        _fits("spend_per_day", limits.spend_per_day, amounts.spend / PICO)
        yield PerDay(scope, Meter.SPEND, limits.spend_per_day, amounts.spend, PICO)


def _fits(quota: str, limit: float, amount: float) -> None:
    if amount > limit:
        raise LargerThanQuota(quota, limit, amount)

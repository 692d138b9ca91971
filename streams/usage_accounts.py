"""Prices, and accounts: what a request has reserved on counters of a day and month. Pure."""

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Self

from streams import subjects

PICO = 10**12  # prices and spend are integers in 10⁻¹² of the currency, so that sums are exact
PICO_PER_MILLION = PICO // 10**6  # of one token, for each unit of the price of a million tokens
_CACHED_ENTRIES = 1024  # most records have one of few
MICRO, NANOSECONDS_PER_HOUR = 10**6, 3600 * 10**9
NO_CURRENCY = "XXX"  # ISO 4217's code for none
TENANT_SCOPE = "tenant"  # the scope of a tenant's own quotas; `key_scope` has those of keys


class Meter(StrEnum):
    """Quantity that one usage counter counts; the value is a part of the counter's NATS subject."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    OPEN = "open"  # requests that have not ended
    SPEND = "spend"
    USES = "uses"  # of an API key, also for what is no request for inference


def key_scope(name: str) -> str:
    """Return the counter scope for one API key, named `name`: `key-` followed by the name.

    A scope says whose use a counter counts: the tenant's (`TENANT_SCOPE`) or one key's.
    """
    return f"key-{name}"


@dataclass(frozen=True)
class Price:
    """Price of one prompt token and of one generated token, in units of 10⁻¹² of the currency.

    `cached` is that of a prompt token which a prefix cache had; None means the same as `prompt`.
    """

    prompt: int = 0
    completion: int = 0
    cached: int | None = None

    @property
    def cached_or_prompt(self) -> int:
        """The price of a cached prompt token."""
        return self.prompt if self.cached is None else self.cached

    @classmethod
    def per_million(cls, prompt: float, completion: float) -> Self:
        """Return the price per token, given prices as operators write them.

        `prompt` and `completion` are in currency units for a million tokens. Each price per token
        is rounded to a whole number of 10⁻¹² of the currency.
        """
        return cls(round(prompt * PICO_PER_MILLION), round(completion * PICO_PER_MILLION))

    def spend_for(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> int:
        """Return the cost of these tokens, as an integer in 10⁻¹² of the currency.

        `cached_tokens` of the `prompt_tokens` were cached.
        """
        fresh = prompt_tokens - cached_tokens
        spend = fresh * self.prompt + cached_tokens * self.cached_or_prompt
        return spend + completion_tokens * self.completion


def format_amount(picos: int) -> str:
    """Return an amount in 10⁻¹² of a currency as that of the currency, exactly."""
    return f"{Decimal(picos).scaleb(-12).normalize():f}" if picos else "0"


@dataclass(frozen=True)
class PriceEntry:
    """One numbered entry of the price book: what a model's tokens cost, in which currency.

    An entry never changes, and a request is billed by the one that was its model's when it was
    accepted. `version` 0 means that the book has no entry for the model: the price is the one in
    the model's own record. `currency` is a code of ISO 4217, `XXX` where none was named.
    """

    version: int = 0
    currency: str = NO_CURRENCY
    price: Price = Price()

    def pack(self) -> str:
        """Return the entry as one line of text, the value of the request header `Price`."""
        price = self.price
        cached = "-" if price.cached is None else price.cached
        return f"{self.version} {self.currency} {price.prompt} {cached} {price.completion}"

    @staticmethod
    def unpack(packed: str) -> "PriceEntry":
        """Return the entry that `pack` encoded; raises ValueError for text of another form."""
        return _parse_entry(packed)


@lru_cache(_CACHED_ENTRIES)
def _parse_entry(packed: str) -> PriceEntry:
    version, currency, prompt, cached, completion = packed.split()
    cached_price = None if cached == "-" else int(cached)
    return PriceEntry(int(version), currency, Price(int(prompt), int(completion), cached_price))


@dataclass(frozen=True)
class WorkerPrice:
    """Price of a worker's hour to us, as an integer in 10⁻⁶ of the currency.

    Its product with nanoseconds is a cost: an integer again, so that sums of costs are exact.
    """

    currency: str = NO_CURRENCY
    per_hour: int = 0

    def pack(self) -> str:
        """Return the price as one line of text."""
        return f"{self.currency} {self.per_hour}"

    @staticmethod
    def unpack(packed: str) -> "WorkerPrice":
        """Return the price that `pack` encoded; no cost if it is empty.

        Raises ValueError for text of another form.
        """
        return _parse_worker_price(packed) if packed else WorkerPrice()


@lru_cache(_CACHED_ENTRIES)
def _parse_worker_price(packed: str) -> WorkerPrice:
    currency, per_hour = packed.split()
    return WorkerPrice(currency, int(per_hour))


def format_cost(cost: int) -> str:
    """Return a cost (nanoseconds times `per_hour`) as an amount of the currency, to 12 decimals."""
    picos = round(Fraction(cost * PICO, NANOSECONDS_PER_HOUR * MICRO))
    return format_amount(picos)


@dataclass(frozen=True)
class Account:
    """The usage counters on which one request is counted, and the tokens and spend reserved there.

    The account travels with the request and its ledger record, so that any service can later
    correct the counters to the real use. `scopes` name whose counters they are: the tenant's and
    its API key's. `periods` are the UTC day and month of the reservation, as `2026-11-21` and
    `2026-11`, or one of them. `spend` is in 10⁻¹² of the currency.
    """

    tenant: str
    scopes: tuple[str, ...]
    periods: tuple[str, ...]
    tokens: int
    spend: int
    price: Price

    def pack(self) -> str:
        """Return the account as one line of text, the value of the request header `Account`."""
        numbers = (self.tokens, self.spend, self.price.prompt, self.price.completion)
        lists = (",".join(self.scopes), ",".join(self.periods))
        return " ".join((self.tenant, *lists, *map(str, numbers)))

    @classmethod
    def unpack(cls, packed: str) -> Self:
        """Return the account that `pack` encoded; raises ValueError for text of another form."""
        tenant, scopes, periods, *numbers = packed.split()
        tokens, spend, prompt, completion = map(int, numbers)
        price = Price(prompt, completion)
        return cls(
            tenant, tuple(scopes.split(",")), tuple(periods.split(",")), tokens, spend, price
        )

    @property
    def reserved(self) -> dict[str, int]:
        """Amounts that the reservation added to the token and spend counters, by counter subject.

        Amounts of 0 are left out. Spend is in 10⁻¹² of the currency.
        """
        return self._counter_amounts(self.tokens, self.spend)

    def correction(self, tokens: int, spend: int) -> dict[str, int]:
        """Return the amounts to add, by counter subject, so that the counters show the real use.

        `tokens` and `spend` are what the request has really used. An amount is negative where less
        was used than reserved; amounts of 0 are left out. Spend is in 10⁻¹² of the currency.
        """
        return self._counter_amounts(tokens - self.tokens, spend - self.spend)

    def _counter_amounts(self, tokens: int, spend: int) -> dict[str, int]:
        amounts = {Meter.TOKENS: tokens, Meter.SPEND: spend}
        return {
            subjects.usage(self.tenant, scope, meter, period): amount
            for scope in self.scopes
            for period in self.periods
            for meter, amount in amounts.items()
            if amount
        }

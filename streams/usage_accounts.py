"""The records of the day's counters: prices, and what a request has reserved on which counter. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from streams import subjects

PICO = 10**12  # prices and spending are counted in picos of the currency: integers, exact


_MILLION = 10**6


TENANT_SCOPE = "tenant"  # the scope of a tenant's own quotas


class Meter(StrEnum):
    """What is counted."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    OPEN = "open"  # requests that have not ended
    SPEND = "spend"


def key_scope(name: str) -> str:
    """The scope of one key's quotas."""
    return f"key-{name}"


@dataclass(frozen=True)
class Price:
    """Picos of the currency for each token."""

    prompt: int = 0
    completion: int = 0

    @classmethod
    def per_million(cls, prompt: float, completion: float) -> Self:
        """From what operators write: the price of a million tokens."""
        picos = PICO // _MILLION
        return cls(round(prompt * picos), round(completion * picos))

    def spend_for(self, prompt_tokens: int, completion_tokens: int) -> int:
        return prompt_tokens * self.prompt + completion_tokens * self.completion


@dataclass(frozen=True)
class Account:
    """Where a request's use of a day is counted, and what was reserved there.

    It travels with the request and its ledger record, so that anybody can settle it.
    """

    tenant: str
    scopes: tuple[str, ...]
    day: str
    tokens: int
    spend: int
    price: Price

    def pack(self) -> str:
        """One header's value."""
        numbers = (self.tokens, self.spend, self.price.prompt, self.price.completion)
        return " ".join((self.tenant, ",".join(self.scopes), self.day, *map(str, numbers)))

    @classmethod
    def unpack(cls, packed: str) -> Self:
        tenant, scopes, day, *numbers = packed.split()
        tokens, spend, prompt, completion = map(int, numbers)
        return cls(tenant, tuple(scopes.split(",")), day, tokens, spend, Price(prompt, completion))

    @property
    def reserved(self) -> dict[str, int]:
        """What was added to which counter."""
        return self._counter_amounts(self.tokens, self.spend)

    def correction(self, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
        """What makes the reservation into what was used."""
        tokens = prompt_tokens + completion_tokens - self.tokens
        return self._counter_amounts(
            tokens, self.price.spend_for(prompt_tokens, completion_tokens) - self.spend
        )

    def _counter_amounts(self, tokens: int, spend: int) -> dict[str, int]:
        amounts = {Meter.TOKENS: tokens, Meter.SPEND: spend}
        return {
            subjects.usage(self.tenant, scope, meter, self.day): amount
            for scope in self.scopes
            for meter, amount in amounts.items()
            if amount
        }

"""Prices and accounts: what a request has reserved on which counters of the day. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from streams import subjects

PICO = 10**12  # prices and spend are integers in 10⁻¹² of the currency, so that sums are exact
_MILLION = 10**6
TENANT_SCOPE = "tenant"  # the scope of a tenant's own quotas; `key_scope` has those of keys


class Meter(StrEnum):
    """The quantity that a counter counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    OPEN = "open"  # requests that have not ended
    SPEND = "spend"


def key_scope(name: str) -> str:
    """Return the scope of one key's quotas, by the key's name."""
    return f"key-{name}"


@dataclass(frozen=True)
class Price:
    """Price of a prompt token and of a generated token, in 10⁻¹² of the currency."""

    prompt: int = 0
    completion: int = 0

    @classmethod
    def per_million(cls, prompt: float, completion: float) -> Self:
        """Convert prices as operators write them: currency units for a million tokens."""
        picos = PICO // _MILLION
        return cls(round(prompt * picos), round(completion * picos))

    def spend_for(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return the price of these tokens, in 10⁻¹² of the currency."""
        return prompt_tokens * self.prompt + completion_tokens * self.completion


@dataclass(frozen=True)
class Account:
    """The counters on which a request is counted, and the tokens and spend reserved there.

    It travels with the request and its ledger record, so that any service can settle it. `scopes`
    are the tenant's and its key's; `day` is the day of UTC on which the reservation was made.
    """

    tenant: str
    scopes: tuple[str, ...]
    day: str
    tokens: int
    spend: int
    price: Price

    def pack(self) -> str:
        """Encode as the value of the header `Account`."""
        numbers = (self.tokens, self.spend, self.price.prompt, self.price.completion)
        return " ".join((self.tenant, ",".join(self.scopes), self.day, *map(str, numbers)))

    @classmethod
    def unpack(cls, packed: str) -> Self:
        """Decode what `pack` returned; raises ValueError for anything else."""
        tenant, scopes, day, *numbers = packed.split()
        tokens, spend, prompt, completion = map(int, numbers)
        return cls(tenant, tuple(scopes.split(",")), day, tokens, spend, Price(prompt, completion))

    @property
    def reserved(self) -> dict[str, int]:
        """Amounts that the reservation added, by counter subject."""
        return self._counter_amounts(self.tokens, self.spend)

    def correction(self, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
        """Return the amounts to add, by counter subject, so that the counters show the real use.

        The arguments are the tokens that the request has used; amounts may be negative.
        """
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

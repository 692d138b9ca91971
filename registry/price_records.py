"""Records of the price book, and prices as operators write them: for a million tokens. Pure."""

from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, Field

from registry.models import ModelName, Record
from streams.usage_accounts import MICRO, PICO, PICO_PER_MILLION, Price, PriceEntry

CURRENCY = r"^[A-Z]{3}$"  # ISO 4217
_MAX_PRICE = 10**6  # of a million tokens: what a request costs, in 10⁻¹², stays below 2⁶³


def _check_exact(price: Decimal) -> Decimal:
    """Return `price`; raises ValueError if it has more than six decimals."""
    if price * MICRO % 1:
        raise ValueError(f"{price} has more than 6 decimals, which sums could not keep exact")
    return price


MillionPrice = Annotated[Decimal, Field(ge=0, le=_MAX_PRICE), AfterValidator(_check_exact)]
HourPrice = MillionPrice  # of a worker: with as many decimals


class PriceRecord(Record):
    """An entry of the price book: what a token of one model costs from this version on.

    `version` counts the entries of all models together, from 1. Prices are of one token, as
    integers in 10⁻¹² of the currency; `cached` is that of a prompt token which a prefix cache had,
    None if it costs the same. `created` is epoch seconds.
    """

    version: int = Field(ge=1)
    model: ModelName
    currency: str = Field(pattern=CURRENCY)
    prompt: int = Field(ge=0, le=PICO)
    completion: int = Field(ge=0, le=PICO)
    cached: int | None = Field(default=None, ge=0, le=PICO)
    created: int

    @property
    def entry(self) -> PriceEntry:
        """The entry as requests carry it."""
        price = Price(self.prompt, self.completion, self.cached)
        return PriceEntry(self.version, self.currency, price)


def to_picos(per_million: Decimal) -> int:
    """Return the price of one token, in 10⁻¹² of the currency."""
    return int(per_million * PICO_PER_MILLION)


def per_million(picos: int) -> str:
    """Return a token's price as that of a million tokens, exactly and without an exponent."""
    return f"{(Decimal(picos) / PICO_PER_MILLION).normalize():f}"

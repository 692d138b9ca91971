"""A kind of machine that a provider can start. Pure."""

from dataclasses import dataclass
from decimal import Decimal

from streams.usage_accounts import MICRO


@dataclass(frozen=True)
class MachineType:
    """A kind of machine: what it has, what it costs, and how many can be had.

    `memory` is bytes for models and their KV, None: what is free there. `price_per_hour` is an
    integer in 10⁻⁶ of `currency`. `stock` is how many machines the provider has, and `quota` how
    many may run at once; None: any number. A machine of a `spot` type may be taken back, with
    `notice_seconds` to leave: at the age `reclaim_after_seconds`, or never if that is None.
    """

    name: str
    memory: int | None = None
    boot_seconds: float = 0.0
    price_per_hour: int = 0
    currency: str = "USD"
    stock: int | None = None
    quota: int | None = None
    spot: bool = False
    notice_seconds: float = 0.0
    reclaim_after_seconds: float | None = None

    @property
    def hour_price(self) -> str:
        """The price of an hour as a decimal number, without an exponent."""
        return f"{(Decimal(self.price_per_hour) / MICRO).normalize():f}"

"""Counters of what tenants and their keys use: day by day, and settled with the ledger.

A gateway reserves a request's cost on the day's counters before it publishes it. Whoever writes its
ledger record corrects them to what was used, once: the increment's message id is the request's.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from streams import subjects
from streams.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable, Overloaded
from streams.headers import INCREMENT, MESSAGE_ID
from streams.messages import LedgerRecord

PICO = 10**12  # prices and spending are counted in picos of the currency: integers, exact
_MILLION = 10**6
TENANT = "tenant"  # the scope of a tenant's own quotas


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

    def of(self, prompt_tokens: int, completion_tokens: int) -> int:
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
        return self._each(self.tokens, self.spend)

    def correction(self, prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
        """What makes the reservation into what was used."""
        tokens = prompt_tokens + completion_tokens - self.tokens
        return self._each(tokens, self.price.of(prompt_tokens, completion_tokens) - self.spend)

    def _each(self, tokens: int, spend: int) -> dict[str, int]:
        amounts = {Meter.TOKENS: tokens, Meter.SPEND: spend}
        return {
            subjects.usage(self.tenant, scope, meter, self.day): amount
            for scope in self.scopes
            for meter, amount in amounts.items()
            if amount
        }


def increment(amount: int) -> dict[str, str]:
    """The headers of an increment; one by nothing reads the counter behind earlier increments."""
    return {INCREMENT: f"{amount:+d}"}


async def add(broker: Broker, subject: str, amount: int, id: str = "") -> int:
    """Add to a counter and return its total. Raises `BrokerUnavailable` or `Overloaded`.

    With an `id` that nobody has used, `add_once` can make sure of it later.
    """
    headers = increment(amount) | ({MESSAGE_ID: id} if id else {})
    try:
        stored = await broker.store(subject, b"", headers)
    except StoreRefused as refusal:
        raise Overloaded(f"the broker refuses to count: {refusal}") from refusal
    if stored.total is None:
        raise BrokerUnavailable("the broker does not count: nats-server 2.12 or newer is needed")
    return stored.total


async def add_once(broker: Broker, amounts: Mapping[str, int], cause: str, seconds: float) -> None:
    """Add to counters, each once for one `cause`; rides out a silent broker for `seconds`."""
    await asyncio.gather(
        *(
            broker.store_retrying(
                subject, b"", increment(amount) | {MESSAGE_ID: f"{cause}.{subject}"}, seconds
            )
            for subject, amount in amounts.items()
        )
    )


async def settle(broker: Broker, record: LedgerRecord, seconds: float) -> None:
    """Make a request's reservation into what it has used, once. Nothing ran: nothing was used."""
    if not record.account:
        return
    used = (record.prompt_tokens, record.completion_tokens) if record.attempts else (0, 0)
    correction = Account.unpack(record.account).correction(*used)
    await add_once(broker, correction, record.request_id, seconds)

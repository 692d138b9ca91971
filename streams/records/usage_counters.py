"""Counters of what tenants and their keys use: day by day, and settled with the ledger.

A gateway reserves a request's cost on the day's counters before it publishes it. Whoever writes its
ledger record corrects them to what was used, once: the increment's message id is the request's.
"""

import asyncio
from collections.abc import Mapping

from streams.broker.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable, Overloaded
from streams.headers import INCREMENT, MESSAGE_ID
from streams.messages import LedgerRecord
from streams.usage_accounts import Account


def increment_headers(amount: int) -> dict[str, str]:
    """The headers of an increment; one by nothing reads the counter behind earlier increments."""
    return {INCREMENT: f"{amount:+d}"}


async def add_to_counter(broker: Broker, subject: str, amount: int, id: str = "") -> int:
    """Add to a counter and return its total. Raises `BrokerUnavailable` or `Overloaded`.

    With an `id` that nobody has used, `add_once` can make sure of it later.
    """
    headers = increment_headers(amount) | ({MESSAGE_ID: id} if id else {})
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
                subject,
                b"",
                increment_headers(amount) | {MESSAGE_ID: f"{cause}.{subject}"},
                seconds,
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

"""Usage counters of tenants and their keys: kept by the broker per day, settled with the ledger.

A gateway reserves a request's cost on the day's counters before it publishes the request. The
service that writes the ledger record corrects them to the real use, once: the correction's message
id is made of the request's.
"""

import asyncio
from collections.abc import Mapping

from streams.broker.connection import Broker, StoreRefused
from streams.errors import BrokerUnavailable, Overloaded
from streams.headers import INCREMENT, MESSAGE_ID
from streams.messages import LedgerRecord
from streams.usage_accounts import Account


def increment_headers(amount: int) -> dict[str, str]:
    """Return the headers of an increment (ADR-49).

    An increment by 0 reads the counter, behind all earlier increments.
    """
    return {INCREMENT: f"{amount:+d}"}


async def add_to_counter(broker: Broker, subject: str, amount: int, id: str = "") -> int:
    """Add to a counter and return its new total. Raises `BrokerUnavailable` or `Overloaded`.

    With an unused message `id` of the form `<cause>.<subject>`, a caller that got no answer can
    repeat the increment by `add_once` with that cause; it is counted once.
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
    """Add to counters by subject, each once for one `cause`, however often this is called.

    Retries for `seconds` while the broker does not answer, then raises `BrokerUnavailable`.
    """
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
    """Correct a request's reservation to what it has used, once.

    A request without an attempt has used nothing; one without an account is not counted. Raises as
    `add_once`.
    """
    if not record.account:
        return
    used = (record.prompt_tokens, record.completion_tokens) if record.attempts else (0, 0)
    correction = Account.unpack(record.account).correction(*used)
    await add_once(broker, correction, record.request_id, seconds)

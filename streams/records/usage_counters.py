"""Usage counters of tenants and their keys: kept by the broker per day, settled with the ledger.

A gateway reserves a request's cost on the day's counters before it publishes the request. The
service that writes the ledger record corrects them to the real use, once: the correction's message
id is made of the request's.
"""

import asyncio
from collections.abc import Mapping

from streams.broker.broker_client import Broker, StoreRefused
from streams.errors import BrokerUnavailable, Overloaded
from streams.headers import INCREMENT, MESSAGE_ID
from streams.messages import LedgerRecord
from streams.usage_accounts import Account


def increment_headers(amount: int) -> dict[str, str]:
    """Return the headers of a message that adds `amount` to a broker-side counter (ADR-49).

    An increment by 0 changes nothing; its confirmation holds the total of all earlier increments.
    """
    return {INCREMENT: f"{amount:+d}"}


async def add_to_counter(broker: Broker, subject: str, amount: int, id: str = "") -> int:
    """Add `amount` to the counter on `subject` and return the counter's new total.

    Tries once. Raises `Overloaded` if the broker refuses. Raises `BrokerUnavailable` if the broker
    does not answer, in which case the amount may or may not have been added, or if it is too old to
    count. With an unused message `id` of the form `<cause>.<subject>`, a caller that got no answer
    can call `add_once` with that cause; the amount is then counted once.
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
    """Add amounts to counters, given by counter subject, once for each `cause`.

    However often this is called with the same cause, the broker counts each amount once, by its
    message id. Returns when all are stored. Retries for `seconds` while the broker does not answer,
    then raises `BrokerUnavailable`; some amounts may have been added by then. Raises `StoreRefused`
    if the broker refuses.
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


async def undo(broker: Broker, amounts: Mapping[str, int], cause: str, seconds: float) -> None:
    """Take back amounts of which it is not known whether all were added under `cause`.

    They are added once more under the same cause, which counts what was not counted, and then
    subtracted, once. The counters are never too low meanwhile. Call it while the broker still
    recognises the first addition. Retries for `seconds` and raises as `add_once` does.
    """
    await add_once(broker, amounts, cause, seconds)
    await give_back(broker, amounts, cause, seconds)


async def give_back(broker: Broker, amounts: Mapping[str, int], cause: str, seconds: float) -> None:
    """Subtract amounts that were added under `cause`, once; retries and raises as `add_once`."""
    negated = {subject: -amount for subject, amount in amounts.items()}
    await add_once(broker, negated, f"{cause}.back", seconds)


async def settle(broker: Broker, record: LedgerRecord, seconds: float) -> None:
    """Correct the usage counters from a request's reservation to what the request has used.

    Calling this again for the same request changes nothing. A request that no worker attempted has
    used nothing; for a record without an account nothing is done. Retries for `seconds` and raises
    as `add_once` does.
    """
    if not record.account:
        return
    account, (prompt, completion, _) = Account.unpack(record.account), record.billed_tokens
    # A gateway of an older release has told the price in the account alone
    spend = record.charge if record.price else account.price.spend_for(prompt, completion)
    correction = account.correction(prompt + completion, spend)
    await add_once(broker, correction, record.request_id, seconds)

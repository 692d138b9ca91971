"""Pending reservations: what is on usage counters for requests that are not known to be queued.

Each process that reserves keeps them all in one message of the stream RESERVATIONS, which it
replaces before it adds anything to a counter. So whatever a process had reserved when it died can
be read, and given back if its request was never queued.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from streams import messages, subjects, topology
from streams.broker.broker_client import Broker
from streams.usage_accounts import Account


@dataclass(frozen=True)
class PendingReservation:
    """One addition to counters of a day and month.

    `cause` is the id of the addition, another for each reservation. `packed_account` has what was
    reserved where. `reserved_ms` (epoch milliseconds) is also when the request was accepted, if it
    was queued; so it tells this reservation from another one of the same request. By `expires_at`
    (epoch seconds) the request has ended, or was never queued. Its ledger record comes behind the
    sequence `ledger_seq`.
    """

    request_id: str
    cause: str
    packed_account: str
    reserved_ms: int
    expires_at: float
    ledger_seq: int

    @property
    def account(self) -> Account:
        """Amounts that were reserved, and their counters."""
        return Account.unpack(self.packed_account)


async def store(broker: Broker, holder: str, pending: Iterable[PendingReservation]) -> None:
    """Replace what the process `holder` has pending.

    Raises `StoreRefused`, or `BrokerUnavailable`, after which it may have been stored.
    """
    packed = messages.pack(list(pending))
    await broker.store(subjects.reservations(holder), packed, repeats=True)


async def read_all(broker: Broker) -> list[PendingReservation]:
    """Return what all processes had pending when they last stored it, also those that are gone.

    Reservations that were settled or given back since may be in it. Raises `BrokerUnavailable`.
    """
    found = await broker.read_subject(topology.RESERVATIONS, subjects.ALL_RESERVATIONS)
    return [
        messages.from_wire(PendingReservation, fields)
        for message in found
        for fields in messages.unpack(message.data)
    ]

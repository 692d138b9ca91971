"""Pending reservations: what is on usage counters for requests that are not known to be queued.

Each process that reserves keeps them all in one message of the stream RESERVATIONS, which it
replaces before it adds anything to a counter. So whatever a process had reserved when it died can
be read, and given back if its request was never queued.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from streams import messages, subjects, topology
from streams.broker.broker_client import Broker, StoredMessage
from streams.usage_accounts import Account

log = structlog.get_logger()


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
    return [each for message in found for each in _read_message(message)]


def _read_message(message: StoredMessage) -> list[PendingReservation]:
    """Return what a process has pending; nothing, with a log event, if that cannot be read.

    Whoever may reserve may write anything here, and that must not end other processes.
    """
    try:
        return [_from_wire(fields) for fields in messages.unpack(message.data)]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        log.error("record_unreadable", subject=message.subject, reason=repr(error))
        return []


def _from_wire(fields: Mapping[str, Any]) -> PendingReservation:
    """Return a reservation whose fields have the right types; raises as `_read_message` expects."""
    found = PendingReservation(
        request_id=str(fields["request_id"]),
        cause=str(fields["cause"]),
        packed_account=str(fields["packed_account"]),
        reserved_ms=int(fields["reserved_ms"]),
        expires_at=float(fields["expires_at"]),
        ledger_seq=int(fields["ledger_seq"]),
    )
    if not all(map(str.isprintable, (found.cause, *found.account.reserved))):
        raise ValueError("the cause or a counter's name cannot be sent")
    return found

"""Reservations of this gateway that have not ended, one for each request. Pure.

Open requests are counted in leases, anew in each: `roll_leases` returns what must be added to those
that begin. So nothing depends on a decrement that a dead gateway cannot make.
"""

from collections import Counter
from dataclasses import dataclass, replace

from api.submission.quota_checks import QuotaScope
from streams import quota_windows
from streams.usage_accounts import Account, Meter


@dataclass(frozen=True)
class Reservation:
    """All that one request has added to quota counters.

    `concurrency_scopes` are the tenant and key whose limit of open requests it counts towards.
    `request_increments` and `token_increments` are the amounts added to counters of the minute, by
    counter subject. `account` has those of day and month, None without such a quota. `reserved_ms`
    (epoch milliseconds) is also when the request is accepted, if it is. By `expires_at` (epoch
    seconds) the request has certainly ended, or was never accepted.
    """

    request_id: str
    cause: str  # id of the addition to counters of a day or month, another for each reservation
    billed_on: str  # subject on which the request's ledger record is heard
    concurrency_scopes: tuple[QuotaScope, ...]
    request_increments: dict[str, int]
    token_increments: dict[str, int]
    account: Account | None
    reserved_ms: int
    expires_at: float

    @property
    def period_increments(self) -> dict[str, int]:
        """The amounts added to counters of the day and month, by counter subject."""
        return self.account.reserved if self.account else {}

    @property
    def packed_account(self) -> str:
        """The account as one line, as it travels in the request's headers; empty without one.

        Other services settle the counters of day and month by it.
        """
        return self.account.pack() if self.account else ""


class OpenReservations:
    """The reservations of this gateway's requests that have not ended, one for each request id.

    Times are epoch seconds.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, Reservation] = {}
        self._open_counts: Counter[QuotaScope] = Counter()
        self._leases: tuple[int, ...] = ()

    def get(self, request_id: str) -> Reservation | None:
        """Return the reservation of a request; None if there is none here."""
        return self._by_request.get(request_id)

    def __len__(self) -> int:
        return len(self._by_request)

    def roll_leases(self, now: float) -> dict[str, int]:
        """Return the amounts to add to leases that began since the last call, by counter subject.

        A lease is a counter for six seconds, to which each gateway adds its open requests when it
        begins. The result is empty if no lease has begun. Call this before `add`, so that a new
        request is not counted twice.
        """
        leases = quota_windows.open_slots(now)
        fresh = set(leases) - set(self._leases)
        self._leases = leases
        return {
            scope.rate_subject(Meter.OPEN, lease): count
            for lease in fresh
            for scope, count in self._open_counts.items()
        }

    def add(self, reservation: Reservation) -> None:
        """Keep a reservation, and count its request as open from now on.

        The caller adds the request to the counters of the current leases; later ones come from
        `roll_leases`.
        """
        self._by_request[reservation.request_id] = reservation
        self._open_counts.update(reservation.concurrency_scopes)

    def pop(self, request_id: str) -> Reservation | None:
        """Remove and return the reservation of a request that has ended; None if it has none."""
        reservation = self._by_request.pop(request_id, None)
        for scope in reservation.concurrency_scopes if reservation else ():
            self._open_counts[scope] -= 1
            if not self._open_counts[scope]:
                del self._open_counts[scope]
        return reservation

    def close_concurrency(self, request_id: str) -> dict[str, int]:
        """Stop counting a request as open, but keep the rest of its reservation to be settled.

        Returns the amounts to add to the counters of the current leases, -1 each, by counter
        subject; empty if there is no reservation for the request.
        """
        if (reservation := self.pop(request_id)) is None:
            return {}
        self._by_request[request_id] = replace(reservation, concurrency_scopes=())
        return self.lease_decrements(reservation)

    def lease_decrements(self, reservation: Reservation) -> dict[str, int]:
        """Return the amounts to add to the current leases when a reservation ends, by subject.

        Each is -1. Empty if the request was not counted as open.
        """
        return {
            scope.rate_subject(Meter.OPEN, lease): -1
            for scope in reservation.concurrency_scopes
            for lease in self._leases
        }

    def list_expired(self, now: float) -> list[Reservation]:
        """Return the reservations that expire at `now` (epoch seconds) or before; removes none."""
        return [
            reservation
            for reservation in self._by_request.values()
            if now >= reservation.expires_at
        ]

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

    `concurrency_scopes` limit how many requests are open. `request_increments` and
    `token_increments` were added to counters of a minute, by subject. By `expires_at` (epoch
    seconds) the request has ended, or was never accepted.
    """

    request_id: str
    cause: str  # id of the addition to the day's counters, different for each reservation
    concurrency_scopes: tuple[QuotaScope, ...]
    request_increments: dict[str, int]
    token_increments: dict[str, int]
    account: Account | None
    expires_at: float


class Reservations:
    """All reservations of this gateway, by request id. Times are epoch seconds."""

    def __init__(self) -> None:
        self._by_request: dict[str, Reservation] = {}
        self._open_counts: Counter[QuotaScope] = Counter()
        self._leases: tuple[int, ...] = ()

    def get(self, request_id: str) -> Reservation | None:
        """Return a request's reservation; None if it has none here."""
        return self._by_request.get(request_id)

    def __len__(self) -> int:
        return len(self._by_request)

    def roll_leases(self, now: float) -> dict[str, int]:
        """Return what must be added to leases that have begun since the last call, by subject.

        Call it before `add`, so that a new request is not counted twice.
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
        """Count a request as open from now on; the caller adds it to the current leases."""
        self._by_request[reservation.request_id] = reservation
        self._open_counts.update(reservation.concurrency_scopes)

    def pop(self, request_id: str) -> Reservation | None:
        """Remove a request that is not open any more; None if it has no reservation here."""
        reservation = self._by_request.pop(request_id, None)
        for scope in reservation.concurrency_scopes if reservation else ():
            self._open_counts[scope] -= 1
            if not self._open_counts[scope]:
                del self._open_counts[scope]
        return reservation

    def close_concurrency(self, request_id: str) -> dict[str, int]:
        """Stop counting a request as open, and keep its account to be settled.

        Returns what must be added to the leases, as `lease_decrements` does.
        """
        if (reservation := self.pop(request_id)) is None:
            return {}
        self._by_request[request_id] = replace(reservation, concurrency_scopes=())
        return self.lease_decrements(reservation)

    def lease_decrements(self, reservation: Reservation) -> dict[str, int]:
        """Return what must be added to the leases once a reservation has ended, by subject."""
        return {
            scope.rate_subject(Meter.OPEN, lease): -1
            for scope in reservation.concurrency_scopes
            for lease in self._leases
        }

    def list_expired(self, now: float) -> list[Reservation]:
        """Return the reservations whose `expires_at` has come."""
        return [
            reservation
            for reservation in self._by_request.values()
            if now >= reservation.expires_at
        ]

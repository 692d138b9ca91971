"""What this gateway has reserved and not given back: one hold per request. Pure.

Requests that have not ended are counted in leases, anew in each: `roll` says what must be added to
one that begins. So nothing depends on a decrement that a dead gateway cannot make.
"""

from collections import Counter
from dataclasses import dataclass, replace

from api.submission.quota_checks import QuotaScope
from streams import quota_windows
from streams.usage_accounts import Account, Meter


@dataclass(frozen=True)
class Reservation:
    """One request's reservation.

    `concurrent` are the scopes that bound how many are open, `requests` and `tokens` what was added
    to counters of a minute. `expires`: by then the request has ended, or never was.
    """

    request_id: str
    cause: str  # of what was added to the day's counters: no two reservations share it
    concurrency_scopes: tuple[QuotaScope, ...]
    request_increments: dict[str, int]
    token_increments: dict[str, int]
    account: Account | None
    expires_at: float


class Reservations:
    """All holds of this gateway, by request id. Times are epoch seconds."""

    def __init__(self) -> None:
        self._by_request: dict[str, Reservation] = {}
        self._open_counts: Counter[QuotaScope] = Counter()
        self._leases: tuple[int, ...] = ()

    def get(self, request_id: str) -> Reservation | None:
        return self._by_request.get(request_id)

    def __len__(self) -> int:
        return len(self._by_request)

    def roll_leases(self, now: float) -> dict[str, int]:
        """What must be added to the leases that have begun to count; call it before `add`."""
        leases = quota_windows.open_slots(now)
        fresh = set(leases) - set(self._leases)
        self._leases = leases
        return {
            scope.rate_subject(Meter.OPEN, lease): count
            for lease in fresh
            for scope, count in self._open_counts.items()
        }

    def add(self, hold: Reservation) -> None:
        """Its request is open from now on; that much the caller has added to the leases."""
        self._by_request[hold.request_id] = hold
        self._open_counts.update(hold.concurrency_scopes)

    def pop(self, request_id: str) -> Reservation | None:
        """Its request is not open any more."""
        hold = self._by_request.pop(request_id, None)
        for scope in hold.concurrency_scopes if hold else ():
            self._open_counts[scope] -= 1
            if not self._open_counts[scope]:
                del self._open_counts[scope]
        return hold

    def close_concurrency(self, request_id: str) -> dict[str, int]:
        """It is not open any more, and its account stays to be settled; as `closed`."""
        if (hold := self.pop(request_id)) is None:
            return {}
        self._by_request[request_id] = replace(hold, concurrency_scopes=())
        return self.lease_decrements(hold)

    def lease_decrements(self, hold: Reservation) -> dict[str, int]:
        """What must be added to the leases when a hold has gone."""
        return {
            scope.rate_subject(Meter.OPEN, lease): -1
            for scope in hold.concurrency_scopes
            for lease in self._leases
        }

    def list_expired(self, now: float) -> list[Reservation]:
        return [hold for hold in self._by_request.values() if now >= hold.expires_at]

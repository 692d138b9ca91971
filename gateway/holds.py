"""What this gateway has reserved and not given back: one hold per request. Pure.

Requests that have not ended are counted in leases, anew in each: `roll` says what must be added to
one that begins. So nothing depends on a decrement that a dead gateway cannot make.
"""

from collections import Counter
from dataclasses import dataclass, replace

from gateway.checks import Scope
from streams import windows
from streams.usage import Account, Meter


@dataclass(frozen=True)
class Hold:
    """One request's reservation.

    `concurrent` are the scopes that bound how many are open, `requests` and `tokens` what was added
    to counters of a minute. `expires`: by then the request has ended, or never was.
    """

    request_id: str
    cause: str  # of what was added to the day's counters: no two reservations share it
    concurrent: tuple[Scope, ...]
    requests: dict[str, int]
    tokens: dict[str, int]
    account: Account | None
    expires: float


class Holds:
    """All holds of this gateway, by request id. Times are epoch seconds."""

    def __init__(self) -> None:
        self._holds: dict[str, Hold] = {}
        self._open: Counter[Scope] = Counter()
        self._leases: tuple[int, ...] = ()

    def get(self, request_id: str) -> Hold | None:
        return self._holds.get(request_id)

    def __len__(self) -> int:
        return len(self._holds)

    def roll(self, now: float) -> dict[str, int]:
        """What must be added to the leases that have begun to count; call it before `add`."""
        leases = windows.leases(now)
        fresh = set(leases) - set(self._leases)
        self._leases = leases
        return {
            scope.rate(Meter.OPEN, lease): count
            for lease in fresh
            for scope, count in self._open.items()
        }

    def add(self, hold: Hold) -> None:
        """Its request is open from now on; that much the caller has added to the leases."""
        self._holds[hold.request_id] = hold
        self._open.update(hold.concurrent)

    def pop(self, request_id: str) -> Hold | None:
        """Its request is not open any more."""
        hold = self._holds.pop(request_id, None)
        for scope in hold.concurrent if hold else ():
            self._open[scope] -= 1
            if not self._open[scope]:
                del self._open[scope]
        return hold

    def release(self, request_id: str) -> dict[str, int]:
        """It is not open any more, and its account stays to be settled; as `closed`."""
        if (hold := self.pop(request_id)) is None:
            return {}
        self._holds[request_id] = replace(hold, concurrent=())
        return self.closed(hold)

    def closed(self, hold: Hold) -> dict[str, int]:
        """What must be added to the leases when a hold has gone."""
        return {
            scope.rate(Meter.OPEN, lease): -1 for scope in hold.concurrent for lease in self._leases
        }

    def expired(self, now: float) -> list[Hold]:
        return [hold for hold in self._holds.values() if now >= hold.expires]

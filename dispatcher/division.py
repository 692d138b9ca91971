"""The division of a fleet's room among tenants, and what of it is kept free for whom. Pure.

Room is counted in tokens. A request takes a place's worth of them at least: the larger of its two
shares counts (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). `docs/scheduling.md` derives
the formulas.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, log

from dispatcher.accounts import Account, Flow, Load, room_of

ACTIVE_SECONDS = 60.0  # who has asked for nothing for so long has no part
# The share of arrivals that may find nothing kept free for them: then they wait, or what gives way
# to them is computed again.
WAITS, PREEMPTS = 0.01, 0.2
# Parts that a tenant may ask for at once, up to a half of the fleet, or be ahead of one that waits,
# and stays calm.
BURST = 2
RESERVABLE = 0.9  # of a fleet; reservations beyond it are cut down to it


@dataclass(slots=True)
class _Side:
    """The calm or the heavy: what they hold together, what they ask for, and their weight."""

    held: Load = field(default_factory=Load)
    demand: Flow = field(default_factory=Flow)
    weight: float = 0.0

    def count(self, account: Account, sign: int) -> None:
        self.held.requests += sign * account.held.requests
        self.held.tokens += sign * account.held.tokens
        self.demand.join(account.demand, sign)
        self.weight = max(0.0, self.weight + sign * account.weight)


class Division:
    """Max-min fair: the calm ask for less than their part, the heavy divide what is left by weight.

    A tenant is judged when something of its own changes, in O(1). What the calm are likely to ask
    for next is kept free of heavy work, and what anybody is likely to, of batch work.
    """

    def __init__(self) -> None:
        self._tokens = inf
        self._place = 0.0  # tokens for each sequence
        self._accounts: dict[str, Account] = {}
        self._in_flight = Load()  # batch work, too
        self._calm, self._heavy = _Side(), _Side()
        self._released = Flow()
        self._reserving: set[str] = set()
        self._reserved, self._unclaimed = 0, 0.0  # tokens: of all tenants, and not made use of
        self._active: OrderedDict[str, tuple[float, float]] = OrderedDict()  # since when, weight
        self._active_weight = 0.0
        self._now = 0.0  # of the last that was asked for

    @property
    def accounts(self) -> dict[str, Account]:
        return self._accounts

    def account(self, tenant: str) -> Account:
        if (account := self._accounts.get(tenant)) is None:
            account = self._accounts[tenant] = Account()
            self._calm.weight += account.weight
        return account

    def resize(self, sequences: int, tokens: int) -> None:
        """The room of the whole fleet, in use or not."""
        self._tokens = tokens if sequences else inf
        place = tokens / sequences if sequences else 0.0
        if place != self._place:
            self._place = place
            self._count_unclaimed()

    def restore(self, tenant: str, counter: float, demand: Flow) -> None:
        """What an earlier leader knew of a tenant; call it before anything of it is known here."""
        account = self.account(tenant)
        account.counter, account.demand = counter, demand
        self._side(account).demand.join(demand, +1)

    def set_weight(self, tenant: str, weight: float) -> None:
        account = self.account(tenant)
        self._side(account).weight += weight - account.weight
        account.weight = weight

    def reserve(self, tokens: Mapping[str, int]) -> None:
        """What each tenant has reserved; one that is not named has nothing."""
        for tenant in self._reserving | tokens.keys():
            self.account(tenant).reserved_tokens = tokens.get(tenant, 0)
        self._reserving, self._reserved = set(tokens), sum(tokens.values())
        self._count_unclaimed()

    @property
    def claimants(self) -> list[str]:
        """The tenants that do not use all that they have reserved."""
        return [name for name in self._reserving if self._unclaimed_of(self._accounts[name])]

    def _count_unclaimed(self) -> None:
        accounts = (self._accounts[tenant] for tenant in self._reserving)
        self._unclaimed = sum(self._unclaimed_of(account) for account in accounts)

    def _unclaimed_of(self, account: Account) -> float:
        """What a tenant has reserved and does not use."""
        if not account.reserved_tokens:
            return 0.0
        return max(0.0, account.reserved_tokens - account.held.size(self._place))

    # What happens to urgent requests: to those that are not batch work

    def asked(self, tenant: str, cost: int, now: float) -> None:
        """A tenant's request waits."""
        account = self.account(tenant)
        self._now = now
        account.asked.add(cost)
        self._remember(tenant, account.weight, now)

    def demanded(self, tenant: str, cost: int, now: float) -> None:
        """It has just been asked for: more of the kind is likely."""
        account, size = self.account(tenant), max(cost, self._place)
        account.demand.add(size, now)
        self._side(account).demand.add(size, now)

    def left(self, tenant: str, cost: int) -> None:
        """It waits no more."""
        self.account(tenant).asked.remove(cost)

    def holds(self, tenant: str, cost: int) -> None:
        """It is in flight."""
        account = self.account(tenant)
        self._unclaimed -= self._unclaimed_of(account)
        account.held.add(cost)
        self._in_flight.add(cost)
        self._side(account).held.add(cost)
        self._unclaimed += self._unclaimed_of(account)

    def freed(self, tenant: str, cost: int) -> None:
        """It has ended."""
        account = self.account(tenant)
        self._unclaimed -= self._unclaimed_of(account)
        account.held.remove(cost)
        self._in_flight.remove(cost)
        self._side(account).held.remove(cost)
        self._unclaimed += self._unclaimed_of(account)
        self._released.add(max(cost, self._place), self._now)

    def holds_batch(self, cost: int) -> None:
        """A batch request is in flight."""
        self._in_flight.add(cost)

    def freed_batch(self, cost: int) -> None:
        """It has ended."""
        self._in_flight.remove(cost)

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is in flight."""
        return not self._in_flight.requests

    def judge(self, tenant: str, ahead: Callable[[], float]) -> bool:
        """Put a tenant on its side by what it asks for and holds; True if that has changed.

        So does what it has got: `ahead` says its counter less the lowest of those that wait.
        """
        account = self.account(tenant)
        is_heavy = self._is_heavy(account, ahead)
        if is_heavy == account.is_heavy:
            return False
        self._side(account).count(account, -1)
        account.is_heavy = is_heavy
        self._side(account).count(account, +1)
        return True

    def _is_heavy(self, account: Account, ahead: Callable[[], float]) -> bool:
        """Whether it wants more than its part of what the (other) calm leave, or has got more."""
        asked, held, calm = account.asked, account.held, self._calm.held
        place, room = self._place, self._room
        wants = room_of(asked.requests + held.requests, asked.tokens + held.tokens, place)
        if account.is_heavy:
            left, weight, most = room - calm.size(place), self._heavy.weight, 1
        else:
            others = room_of(calm.requests - held.requests, calm.tokens - held.tokens, place)
            left, weight, most = room - others, self._heavy.weight + account.weight, BURST
        if wants > room / BURST or wants > most * left * account.weight / weight:
            return True
        return wants > 0 and self._is_ahead(ahead)

    def _is_ahead(self, ahead: Callable[[], float]) -> bool:
        """Whether a counter is a few parts beyond the lowest, where some tenants are heavy."""
        return self._heavy.weight > 0 and ahead() * self._active_weight > BURST * self._room

    # What is kept free

    def kept_free(self, tenant: str, cost: int, yields: bool, now: float) -> float:
        """The share of the fleet that an urgent request must leave free for other tenants.

        It is less where what goes beyond a tenant's part `yields` to the others. Where nothing is
        kept for anybody it is -inf: the request may also wait in WORK for what is not free yet.
        """
        account = self.account(tenant)
        own = self._unclaimed_of(account)
        kept = 0.0
        if account.is_heavy and account.held.requests and self.is_beyond_part(tenant, cost):
            headroom = self._headroom(self._calm.demand, self._calm.held, yields, now)
            kept = min(headroom, self._unfilled())
        reserved = self._reserved - account.reserved_tokens
        if max(cost, self._place) <= own or not (kept or reserved):
            return -inf
        return (kept + self._promised(own)) / self._tokens

    def kept_free_of_batch(self, yields: bool, now: float) -> float:
        """The share of the fleet that batch work must leave free for urgent work; -inf as above."""
        heavy, calm = self._heavy, self._calm
        held = Load(heavy.held.requests + calm.held.requests, heavy.held.tokens + calm.held.tokens)
        demand = Flow()
        demand.join(heavy.demand, +1)
        demand.join(calm.demand, +1)
        headroom = self._headroom(demand, held, yields, now)
        if not (headroom or self._reserved):
            return -inf
        return (self._promised(0.0) + headroom) / self._tokens

    def _promised(self, own: float) -> float:
        """What is reserved for others and not in use."""
        most = RESERVABLE * self._tokens
        share = min(1.0, most / self._reserved) if self._reserved else 0.0
        return share * (self._unclaimed - own)

    def is_beyond_part(self, tenant: str, cost: int) -> bool:
        """Whether a request takes a tenant beyond its weight's part, and others may want that.

        The calm may go beyond it, but not by a single request that is larger than what they may
        ask for at once.
        """
        if self._active.keys() <= {tenant}:
            return False
        account = self.account(tenant)
        requests, tokens, parts = 1, cost, BURST
        if account.is_heavy:
            requests, tokens, parts = account.held.requests + 1, account.held.tokens + cost, 1
        with_it = room_of(requests, tokens, self._place)
        return with_it * self._active_weight > parts * self._room * account.weight

    def _unfilled(self) -> float:
        """What the calm may still take until they have all of their weights' part."""
        share = 1 - min(1.0, self._heavy.weight / max(self._heavy.weight, self._active_weight))
        return max(0.0, share * self._room - self._calm.held.size(self._place))

    def _headroom(self, demand: Flow, held: Load, yields: bool, now: float) -> float:
        """Room for the next arrivals of those whose demand this is and who hold this.

        Arrivals (compound Poisson) take from it; what others release refills it. It is found empty
        by a share of arrivals that falls exponentially with its size (Kingman 1970).
        """
        demand.fade(now)
        self._released.fade(now)
        refill = self._refill(held)
        empty = PREEMPTS if yields else WAITS
        if not refill or demand.requests <= empty:
            return 0.0
        load = demand.rate / (demand.rate + refill)
        if load <= empty:
            return 0.0
        lump = self._released.squares / self._released.sizes
        variance = 2 * demand.square_rate + refill * lump
        return log(load / empty) * variance / (2 * refill)

    def _refill(self, held: Load) -> float:
        """Tokens per second that others release when they hold all that these do not.

        By Little's law a token is held for (tokens in flight) / (tokens released per second).
        """
        in_flight = self._in_flight.size(self._place)
        if not in_flight:
            return 0.0
        others = max(0.0, self._room - held.size(self._place))
        return others * self._released.rate / in_flight

    @property
    def _room(self) -> float:
        """All of the fleet, in reserved tokens, of which it may hold more than its KV has."""
        in_flight = self._in_flight.size(self._place)
        return max(self._tokens, in_flight)

    def _side(self, account: Account) -> _Side:
        return self._heavy if account.is_heavy else self._calm

    def _remember(self, tenant: str, weight: float, now: float) -> None:
        """It is active, and others may not be any more."""
        _, before = self._active.pop(tenant, (0.0, 0.0))
        self._active[tenant] = now, weight
        self._active_weight += weight - before
        while (oldest := next(iter(self._active.values())))[0] < now - ACTIVE_SECONDS:
            self._active.popitem(last=False)
            self._active_weight -= oldest[1]

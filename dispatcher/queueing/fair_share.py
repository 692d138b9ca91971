"""The division of a fleet's room among tenants, and what of it is kept free for whom. Pure.

Room is counted in tokens. A request takes a place's worth of them at least: the larger of its two
shares counts (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). `docs/scheduling.md` derives
the formulas.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, log

from dispatcher.queueing.tenant_state import (
    DecayingFlow,
    RequestTotals,
    TenantState,
    dominant_tokens,
)

ACTIVE_SECONDS = 60.0  # who has asked for nothing for so long has no part
# The share of arrivals that may find nothing kept free for them: then they wait, or what gives way
# to them is computed again.
MISS_RATE_IF_WAITING, MISS_RATE_IF_PREEMPTING = 0.01, 0.2
# Parts that a tenant may ask for at once, up to a half of the fleet, or be ahead of one that waits,
# and stays calm.
BURST_SHARES = 2
RESERVABLE_FRACTION = 0.9  # of a fleet; reservations beyond it are cut down to it


@dataclass(slots=True)
class _ShareGroup:
    """The calm or the heavy: what they hold together, what they ask for, and their weight."""

    in_flight_load: RequestTotals = field(default_factory=RequestTotals)
    demand: DecayingFlow = field(default_factory=DecayingFlow)
    weight: float = 0.0

    def adjust(self, account: TenantState, sign: int) -> None:
        self.in_flight_load.requests += sign * account.in_flight_load.requests
        self.in_flight_load.tokens += sign * account.in_flight_load.tokens
        self.demand.merge(account.demand, sign)
        self.weight = max(0.0, self.weight + sign * account.weight)


class FairShare:
    """Max-min fair: the calm ask for less than their part, the heavy divide what is left by weight.

    A tenant is judged when something of its own changes, in O(1). What the calm are likely to ask
    for next is kept free of heavy work, and what anybody is likely to, of batch work.
    """

    def __init__(self) -> None:
        self._fleet_tokens = inf
        self._tokens_per_sequence = 0.0  # tokens for each sequence
        self._tenants: dict[str, TenantState] = {}
        self._in_flight = RequestTotals()  # batch work, too
        self._below_share, self._above_share = _ShareGroup(), _ShareGroup()
        self._released = DecayingFlow()
        self._reserved_tenants: set[str] = set()
        self._reserved_tokens, self._unused_reserved_tokens = (
            0,
            0.0,
        )  # tokens: of all tenants, and not made use of
        self._active: OrderedDict[str, tuple[float, float]] = OrderedDict()  # since when, weight
        self._active_weight = 0.0
        self._now = 0.0  # of the last that was asked for

    @property
    def tenants(self) -> dict[str, TenantState]:
        return self._tenants

    def get_tenant(self, tenant: str) -> TenantState:
        if (account := self._tenants.get(tenant)) is None:
            account = self._tenants[tenant] = TenantState()
            self._below_share.weight += account.weight
        return account

    def set_capacity(self, sequences: int, tokens: int) -> None:
        """The room of the whole fleet, in use or not."""
        self._fleet_tokens = tokens if sequences else inf
        place = tokens / sequences if sequences else 0.0
        if place != self._tokens_per_sequence:
            self._tokens_per_sequence = place
            self._sum_unused_reservations()

    def restore(self, tenant: str, counter: float, demand: DecayingFlow) -> None:
        """What an earlier leader knew of a tenant; call it before anything of it is known here."""
        account = self.get_tenant(tenant)
        account.counter, account.demand = counter, demand
        self._group(account).demand.merge(demand, +1)

    def set_weight(self, tenant: str, weight: float) -> None:
        account = self.get_tenant(tenant)
        self._group(account).weight += weight - account.weight
        account.weight = weight

    def set_reserved_tokens(self, tokens: Mapping[str, int]) -> None:
        """What each tenant has reserved; one that is not named has nothing."""
        for tenant in self._reserved_tenants | tokens.keys():
            self.get_tenant(tenant).reserved_tokens = tokens.get(tenant, 0)
        self._reserved_tenants, self._reserved_tokens = set(tokens), sum(tokens.values())
        self._sum_unused_reservations()

    @property
    def tenants_with_unused_reservation(self) -> list[str]:
        """The tenants that do not use all that they have reserved."""
        return [
            name for name in self._reserved_tenants if self._unused_reservation(self._tenants[name])
        ]

    def _sum_unused_reservations(self) -> None:
        accounts = (self._tenants[tenant] for tenant in self._reserved_tenants)
        self._unused_reserved_tokens = sum(
            self._unused_reservation(account) for account in accounts
        )

    def _unused_reservation(self, account: TenantState) -> float:
        """What a tenant has reserved and does not use."""
        if not account.reserved_tokens:
            return 0.0
        return max(
            0.0,
            account.reserved_tokens
            - account.in_flight_load.dominant_tokens(self._tokens_per_sequence),
        )

    # What happens to urgent requests: to those that are not batch work

    def enqueue(self, tenant: str, cost: int, now: float) -> None:
        """A tenant's request waits."""
        account = self.get_tenant(tenant)
        self._now = now
        account.queued_load.add(cost)
        self._mark_active(tenant, account.weight, now)

    def record_demand(self, tenant: str, cost: int, now: float) -> None:
        """It has just been asked for: more of the kind is likely."""
        account, size = self.get_tenant(tenant), max(cost, self._tokens_per_sequence)
        account.demand.add(size, now)
        self._group(account).demand.add(size, now)

    def dequeue(self, tenant: str, cost: int) -> None:
        """It waits no more."""
        self.get_tenant(tenant).queued_load.remove(cost)

    def reserve(self, tenant: str, cost: int) -> None:
        """It is in flight."""
        account = self.get_tenant(tenant)
        self._unused_reserved_tokens -= self._unused_reservation(account)
        account.in_flight_load.add(cost)
        self._in_flight.add(cost)
        self._group(account).in_flight_load.add(cost)
        self._unused_reserved_tokens += self._unused_reservation(account)

    def release(self, tenant: str, cost: int) -> None:
        """It has ended."""
        account = self.get_tenant(tenant)
        self._unused_reserved_tokens -= self._unused_reservation(account)
        account.in_flight_load.remove(cost)
        self._in_flight.remove(cost)
        self._group(account).in_flight_load.remove(cost)
        self._unused_reserved_tokens += self._unused_reservation(account)
        self._released.add(max(cost, self._tokens_per_sequence), self._now)

    def reserve_batch(self, cost: int) -> None:
        """A batch request is in flight."""
        self._in_flight.add(cost)

    def release_batch(self, cost: int) -> None:
        """It has ended."""
        self._in_flight.remove(cost)

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is in flight."""
        return not self._in_flight.requests

    def reclassify(self, tenant: str, ahead: Callable[[], float]) -> bool:
        """Put a tenant on its side by what it asks for and holds; True if that has changed.

        So does what it has got: `ahead` says its counter less the lowest of those that wait.
        """
        account = self.get_tenant(tenant)
        is_heavy = self._is_above_share(account, ahead)
        if is_heavy == account.is_above_share:
            return False
        self._group(account).adjust(account, -1)
        account.is_above_share = is_heavy
        self._group(account).adjust(account, +1)
        return True

    def _is_above_share(self, account: TenantState, ahead: Callable[[], float]) -> bool:
        """Whether it wants more than its part of what the (other) calm leave, or has got more."""
        asked, held, calm = (
            account.queued_load,
            account.in_flight_load,
            self._below_share.in_flight_load,
        )
        place, room = self._tokens_per_sequence, self._capacity_tokens
        wants = dominant_tokens(asked.requests + held.requests, asked.tokens + held.tokens, place)
        if account.is_above_share:
            left, weight, most = room - calm.dominant_tokens(place), self._above_share.weight, 1
        else:
            others = dominant_tokens(
                calm.requests - held.requests, calm.tokens - held.tokens, place
            )
            left, weight, most = (
                room - others,
                self._above_share.weight + account.weight,
                BURST_SHARES,
            )
        if wants > room / BURST_SHARES or wants > most * left * account.weight / weight:
            return True
        return wants > 0 and self._is_ahead(ahead)

    def _is_ahead(self, ahead: Callable[[], float]) -> bool:
        """Whether a counter is a few parts beyond the lowest, where some tenants are heavy."""
        return (
            self._above_share.weight > 0
            and ahead() * self._active_weight > BURST_SHARES * self._capacity_tokens
        )

    # What is kept free

    def required_headroom(self, tenant: str, cost: int, yields: bool, now: float) -> float:
        """The share of the fleet that an urgent request must leave free for other tenants.

        It is less where what goes beyond a tenant's part `yields` to the others. Where nothing is
        kept for anybody it is -inf: the request may also wait in WORK for what is not free yet.
        """
        account = self.get_tenant(tenant)
        own = self._unused_reservation(account)
        kept = 0.0
        if (
            account.is_above_share
            and account.in_flight_load.requests
            and self.exceeds_share(tenant, cost)
        ):
            headroom = self._headroom(
                self._below_share.demand, self._below_share.in_flight_load, yields, now
            )
            kept = min(headroom, self._unfilled_share())
        reserved = self._reserved_tokens - account.reserved_tokens
        if max(cost, self._tokens_per_sequence) <= own or not (kept or reserved):
            return -inf
        return (kept + self._reserved_for_others(own)) / self._fleet_tokens

    def required_headroom_for_batch(self, yields: bool, now: float) -> float:
        """The share of the fleet that batch work must leave free for urgent work; -inf as above."""
        heavy, calm = self._above_share, self._below_share
        held = RequestTotals(
            heavy.in_flight_load.requests + calm.in_flight_load.requests,
            heavy.in_flight_load.tokens + calm.in_flight_load.tokens,
        )
        demand = DecayingFlow()
        demand.merge(heavy.demand, +1)
        demand.merge(calm.demand, +1)
        headroom = self._headroom(demand, held, yields, now)
        if not (headroom or self._reserved_tokens):
            return -inf
        return (self._reserved_for_others(0.0) + headroom) / self._fleet_tokens

    def _reserved_for_others(self, own: float) -> float:
        """What is reserved for others and not in use."""
        most = RESERVABLE_FRACTION * self._fleet_tokens
        share = min(1.0, most / self._reserved_tokens) if self._reserved_tokens else 0.0
        return share * (self._unused_reserved_tokens - own)

    def exceeds_share(self, tenant: str, cost: int) -> bool:
        """Whether a request takes a tenant beyond its weight's part, and others may want that.

        The calm may go beyond it, but not by a single request that is larger than what they may
        ask for at once.
        """
        if self._active.keys() <= {tenant}:
            return False
        account = self.get_tenant(tenant)
        requests, tokens, parts = 1, cost, BURST_SHARES
        if account.is_above_share:
            requests, tokens, parts = (
                account.in_flight_load.requests + 1,
                account.in_flight_load.tokens + cost,
                1,
            )
        with_it = dominant_tokens(requests, tokens, self._tokens_per_sequence)
        return with_it * self._active_weight > parts * self._capacity_tokens * account.weight

    def _unfilled_share(self) -> float:
        """What the calm may still take until they have all of their weights' part."""
        share = 1 - min(
            1.0, self._above_share.weight / max(self._above_share.weight, self._active_weight)
        )
        return max(
            0.0,
            share * self._capacity_tokens
            - self._below_share.in_flight_load.dominant_tokens(self._tokens_per_sequence),
        )

    def _headroom(
        self, demand: DecayingFlow, held: RequestTotals, yields: bool, now: float
    ) -> float:
        """Room for the next arrivals of those whose demand this is and who hold this.

        Arrivals (compound Poisson) take from it; what others release refills it. It is found empty
        by a share of arrivals that falls exponentially with its size (Kingman 1970).
        """
        demand.decay(now)
        self._released.decay(now)
        refill = self._refill_rate(held)
        empty = MISS_RATE_IF_PREEMPTING if yields else MISS_RATE_IF_WAITING
        if not refill or demand.effective_requests <= empty:
            return 0.0
        load = demand.rate / (demand.rate + refill)
        if load <= empty:
            return 0.0
        lump = self._released.squares / self._released.sizes
        variance = 2 * demand.square_rate + refill * lump
        return log(load / empty) * variance / (2 * refill)

    def _refill_rate(self, held: RequestTotals) -> float:
        """Tokens per second that others release when they hold all that these do not.

        By Little's law a token is held for (tokens in flight) / (tokens released per second).
        """
        in_flight = self._in_flight.dominant_tokens(self._tokens_per_sequence)
        if not in_flight:
            return 0.0
        others = max(0.0, self._capacity_tokens - held.dominant_tokens(self._tokens_per_sequence))
        return others * self._released.rate / in_flight

    @property
    def _capacity_tokens(self) -> float:
        """All of the fleet, in reserved tokens, of which it may hold more than its KV has."""
        in_flight = self._in_flight.dominant_tokens(self._tokens_per_sequence)
        return max(self._fleet_tokens, in_flight)

    def _group(self, account: TenantState) -> _ShareGroup:
        return self._above_share if account.is_above_share else self._below_share

    def _mark_active(self, tenant: str, weight: float, now: float) -> None:
        """It is active, and others may not be any more."""
        _, before = self._active.pop(tenant, (0.0, 0.0))
        self._active[tenant] = now, weight
        self._active_weight += weight - before
        while (oldest := next(iter(self._active.values())))[0] < now - ACTIVE_SECONDS:
            self._active.popitem(last=False)
            self._active_weight -= oldest[1]

"""Fair shares of a fleet: which tenants exceed theirs, and the headroom kept for the others. Pure.

Capacity is counted in tokens. A request counts as one sequence's worth of tokens at least: the
larger of its two shares counts (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011).
`docs/scheduling.md` derives the formulas.
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

ACTIVE_SECONDS = 60.0  # a tenant without a request for so long has no share
# The fraction of arrivals that may find no headroom. Where engines do not preempt such an arrival
# waits; where they do, preempted work is computed again.
MISS_RATE_IF_WAITING, MISS_RATE_IF_PREEMPTING = 0.01, 0.2
# A tenant counts as below its share while it asks for up to so many shares at once (half of the
# fleet at most), and while its counter is up to so many shares ahead of the lowest that waits.
BURST_SHARES = 2
RESERVABLE_FRACTION = 0.9  # of a fleet; reservations beyond it are scaled down to it


@dataclass(slots=True)
class _ShareGroup:
    """The tenants below their share, or those above it: their summed load, demand and weight."""

    in_flight_load: RequestTotals = field(default_factory=RequestTotals)
    demand: DecayingFlow = field(default_factory=DecayingFlow)
    weight: float = 0.0

    def adjust(self, state: TenantState, sign: int) -> None:
        """Add a tenant to the group (`sign` +1) or take it out (-1)."""
        self.in_flight_load.requests += sign * state.in_flight_load.requests
        self.in_flight_load.tokens += sign * state.in_flight_load.tokens
        self.demand.merge(state.demand, sign)
        self.weight = max(0.0, self.weight + sign * state.weight)


class CapacityShares:
    """Decides how much of the fleet each tenant of a model may use while others want it.

    Capacity is divided max-min fairly by weight: a tenant below its share asks for less than it
    would get, and those above their share divide what is left. A tenant is classified anew only
    when something of its own changes, in O(1). Where engines do not preempt, a request of a tenant
    above its share must leave some capacity free (headroom), for what tenants below theirs are
    likely to ask for next; a batch request must leave headroom for what any other tenant is likely
    to ask for. `cost` is a request's reserved tokens: the prompt plus the most that it may
    generate. Times are seconds of any one clock, given by the caller.
    """

    def __init__(self) -> None:
        self._fleet_tokens = inf
        self._tokens_per_sequence = 0.0
        self._tenants: dict[str, TenantState] = {}
        self._in_flight = RequestTotals()  # of all tenants, batch work included
        self._below_share, self._above_share = _ShareGroup(), _ShareGroup()
        self._released = DecayingFlow()
        self._reserved_tenants: set[str] = set()
        self._reserved_tokens = 0  # of all tenants
        self._unused_reserved_tokens = 0.0
        self._active: OrderedDict[str, tuple[float, float]] = OrderedDict()  # last request, weight
        self._active_weight = 0.0
        self._now = 0.0

    @property
    def tenants(self) -> dict[str, TenantState]:
        """The states of all known tenants by name; not a copy, so that changes are seen here."""
        return self._tenants

    def get_tenant(self, tenant: str) -> TenantState:
        """Return a tenant's state; an unknown tenant gets a new one, with weight 1.

        A new tenant counts as one that asks for less than its fair share.
        """
        if (state := self._tenants.get(tenant)) is None:
            state = self._tenants[tenant] = TenantState()
            self._below_share.weight += state.weight
        return state

    def set_capacity(self, sequences: int, tokens: int) -> None:
        """Set the capacity of the whole fleet, in use or not: sequences at once, and KV tokens.

        Without sequences, as when there are no workers, the capacity counts as infinite.
        """
        self._fleet_tokens = tokens if sequences else inf
        tokens_per_sequence = tokens / sequences if sequences else 0.0
        if tokens_per_sequence != self._tokens_per_sequence:
            self._tokens_per_sequence = tokens_per_sequence
            self._sum_unused_reservations()

    def restore(self, tenant: str, counter: float, demand: DecayingFlow) -> None:
        """Set a tenant's counter and demand to those of an earlier leader's checkpoint.

        Call it once for a tenant, before anything else is recorded of it.
        """
        state = self.get_tenant(tenant)
        state.counter, state.demand = counter, demand
        self._group(state).demand.merge(demand, +1)
        if demand.sizes:
            self._mark_active(tenant, state.weight, demand.at)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Set a tenant's weight, to which its share of the fleet is proportional.

        An unknown tenant is added.
        """
        state = self.get_tenant(tenant)
        self._group(state).weight += weight - state.weight
        state.weight = weight

    def set_reserved_tokens(self, tokens: Mapping[str, int]) -> None:
        """Set how many KV tokens are kept free for each tenant, whether it uses them or not.

        `tokens` replaces all that was set before: tenants that are not named have none.
        """
        for tenant in self._reserved_tenants | tokens.keys():
            self.get_tenant(tenant).reserved_tokens = tokens.get(tenant, 0)
        self._reserved_tenants, self._reserved_tokens = set(tokens), sum(tokens.values())
        self._sum_unused_reservations()

    @property
    def tenants_with_unused_reservation(self) -> list[str]:
        """Names of the tenants that use less than the KV tokens reserved for them.

        Used are the tokens of their requests that were dispatched and have not ended.
        """
        return [
            name for name in self._reserved_tenants if self._unused_reservation(self._tenants[name])
        ]

    def _sum_unused_reservations(self) -> None:
        states = (self._tenants[tenant] for tenant in self._reserved_tenants)
        self._unused_reserved_tokens = sum(self._unused_reservation(state) for state in states)

    def _unused_reservation(self, state: TenantState) -> float:
        """The tenant's reserved tokens less its load in flight, 0 at least."""
        if not state.reserved_tokens:
            return 0.0
        return max(
            0.0,
            state.reserved_tokens - state.in_flight_load.dominant_tokens(self._tokens_per_sequence),
        )

    def advance(self, now: float) -> None:
        """Advance the time to `now`, and drop the shares of tenants that have become inactive.

        A tenant is inactive after `ACTIVE_SECONDS` (60 s) without an urgent (not batch) request. It
        then has no share and no demand, so that nothing is kept free for it.
        """
        self._now = now
        while self._active:
            tenant, (asked_at, weight) = next(iter(self._active.items()))
            if asked_at >= now - ACTIVE_SECONDS:
                break
            self._active.popitem(last=False)
            self._active_weight -= weight
            state = self.get_tenant(tenant)
            self._group(state).demand.merge(state.demand, -1)
            state.demand = DecayingFlow()

    # Events of urgent requests, which are all but batch work

    def enqueue(self, tenant: str, cost: int, now: float) -> None:
        """Count an urgent (not batch) request of `cost` reserved tokens as queued at `now`.

        Its tenant is then active, and has a share, for the next `ACTIVE_SECONDS` (60 s).
        """
        state = self.get_tenant(tenant)
        self.advance(now)
        state.queued_load.add(cost)
        self._mark_active(tenant, state.weight, now)

    def record_demand(self, tenant: str, cost: int, now: float) -> None:
        """Add a new request's size to its tenant's demand, which predicts its next requests.

        `cost` is its reserved tokens. Demand fades by 1/e in 30 s.
        """
        state, size = self.get_tenant(tenant), max(cost, self._tokens_per_sequence)
        state.demand.add(size, now)
        self._group(state).demand.add(size, now)

    def dequeue(self, tenant: str, cost: int) -> None:
        """Stop counting an urgent (not batch) request of `cost` reserved tokens as queued."""
        self.get_tenant(tenant).queued_load.remove(cost)

    def reserve(self, tenant: str, cost: int) -> None:
        """Count an urgent (not batch) request as in flight: dispatched to the workers, not ended.

        `cost` is its reserved tokens.
        """
        state = self.get_tenant(tenant)
        self._unused_reserved_tokens -= self._unused_reservation(state)
        state.in_flight_load.add(cost)
        self._in_flight.add(cost)
        self._group(state).in_flight_load.add(cost)
        self._unused_reserved_tokens += self._unused_reservation(state)

    def release(self, tenant: str, cost: int) -> None:
        """Stop counting an urgent request as in flight, since it has ended or never ran.

        Its `cost` in reserved tokens also adds to the rate at which tokens come free, from which
        the headroom that others must leave is computed.
        """
        state = self.get_tenant(tenant)
        self._unused_reserved_tokens -= self._unused_reservation(state)
        state.in_flight_load.remove(cost)
        self._in_flight.remove(cost)
        self._group(state).in_flight_load.remove(cost)
        self._unused_reserved_tokens += self._unused_reservation(state)
        self._released.add(max(cost, self._tokens_per_sequence), self._now)

    def reserve_batch(self, cost: int) -> None:
        """Count a batch request as in flight: dispatched to the workers, not ended.

        `cost` is its reserved tokens. They count for the fleet, not for a tenant.
        """
        self._in_flight.add(cost)

    def release_batch(self, cost: int) -> None:
        """Take back `reserve_batch` for a batch request that has ended, or was not dispatched.

        `cost` is its reserved tokens.
        """
        self._in_flight.remove(cost)

    @property
    def in_flight_tokens(self) -> int:
        """The reserved tokens of all requests that were dispatched and have not ended.

        Batch work is included.
        """
        return self._in_flight.tokens

    @property
    def is_idle(self) -> bool:
        """True if no request of any tenant is in flight: dispatched and not ended.

        Batch work counts, queued requests do not.
        """
        return not self._in_flight.requests

    def reclassify(self, tenant: str, counter_lead: Callable[[], float]) -> bool:
        """Decide anew whether a tenant is below or above its share; return True if that changed.

        `counter_lead` returns the tenant's counter (service so far over weight, in virtual tokens)
        less the lowest counter of the tenants whose urgent requests wait; it is called only if
        needed.
        """
        state = self.get_tenant(tenant)
        is_above_share = self._is_above_share(state, counter_lead)
        if is_above_share == state.is_above_share:
            return False
        self._group(state).adjust(state, -1)
        state.is_above_share = is_above_share
        self._group(state).adjust(state, +1)
        return True

    def _is_above_share(self, state: TenantState, counter_lead: Callable[[], float]) -> bool:
        """True if a tenant asks for more than its share of what others leave, or has got more.

        Left is what the tenants below their share do not hold, this one itself not counted among
        them.
        """
        queued, in_flight, below = (
            state.queued_load,
            state.in_flight_load,
            self._below_share.in_flight_load,
        )
        tokens_per_sequence, capacity = self._tokens_per_sequence, self._capacity_tokens
        wants = dominant_tokens(
            queued.requests + in_flight.requests,
            queued.tokens + in_flight.tokens,
            tokens_per_sequence,
        )
        if state.is_above_share:
            left, weight, shares = (
                capacity - below.dominant_tokens(tokens_per_sequence),
                self._above_share.weight,
                1,
            )
        else:
            others = dominant_tokens(
                below.requests - in_flight.requests,
                below.tokens - in_flight.tokens,
                tokens_per_sequence,
            )
            left, weight, shares = (
                capacity - others,
                self._above_share.weight + state.weight,
                BURST_SHARES,
            )
        if wants > capacity / BURST_SHARES or wants > shares * left * state.weight / weight:
            return True
        return wants > 0 and self._is_ahead(counter_lead)

    def _is_ahead(self, counter_lead: Callable[[], float]) -> bool:
        """True if a counter is `BURST_SHARES` shares ahead, while any tenant is above its share."""
        return (
            self._above_share.weight > 0
            and counter_lead() * self._active_weight > BURST_SHARES * self._capacity_tokens
        )

    # Headroom

    def required_headroom(self, tenant: str, cost: int, preempts_batch: bool) -> float:
        """Return the fraction of the fleet that an urgent request must leave free for others.

        Urgent is every priority but batch; the others are other tenants. Where `preempts_batch`,
        less stays free, since engines then preempt work beyond its tenant's share; and only
        reserved tokens do where the place is lent. -inf means that nothing has to stay free, or
        that the request fits into reserved tokens that its tenant does not use; it may then be sent
        even where it has to wait for capacity.
        """
        state = self._tenants.get(tenant, TenantState())
        own = self._unused_reservation(state)
        if max(cost, self._tokens_per_sequence) <= own:
            return -inf
        kept = 0.0
        if (
            state.is_above_share
            and state.in_flight_load.requests
            and not (preempts_batch and self._takes_one_sequence(cost))
            and self.exceeds_share(tenant, cost)
        ):
            kept = self._kept_for_below_share(preempts_batch)
        reserved = self._reserved_tokens - state.reserved_tokens
        if not (kept or reserved):
            return -inf
        return (kept + self._reserved_for_others(own)) / self._fleet_tokens

    def required_headroom_for_batch(self, tenant: str, cost: int, preempts_batch: bool) -> float:
        """Return the fraction of the fleet that a tenant's batch request must leave free.

        That is for the urgent requests of other tenants, and for reserved tokens that are not used;
        values as in `required_headroom`.
        """
        is_lent = preempts_batch and self._takes_one_sequence(cost)
        kept = 0.0 if is_lent else self._kept_for_urgent(tenant, preempts_batch)
        if not (kept or self._reserved_tokens):
            return -inf
        return (self._reserved_for_others(0.0) + kept) / self._fleet_tokens

    def _takes_one_sequence(self, cost: int) -> bool:
        """True if sequences are scarcer than KV for a request of so many tokens.

        An engine that preempts gives such a place back at once, and at little cost: it is lent.
        """
        return cost <= self._tokens_per_sequence

    def _kept_for_below_share(self, preempts_batch: bool) -> float:
        """Tokens to keep free of work of tenants above their share."""
        below = self._below_share
        headroom = self._headroom(below.demand, below.in_flight_load, preempts_batch)
        return min(headroom, self._unfilled_share())

    def _kept_for_urgent(self, tenant: str, preempts_batch: bool) -> float:
        """Tokens to keep free of a tenant's batch work: for the urgent work of all others."""
        state, others = self._tenants.get(tenant, TenantState()), _ShareGroup()
        for group in (self._above_share, self._below_share):
            others.in_flight_load.requests += group.in_flight_load.requests
            others.in_flight_load.tokens += group.in_flight_load.tokens
            others.demand.merge(group.demand, +1)
        others.adjust(state, -1)
        return self._headroom(others.demand, others.in_flight_load, preempts_batch)

    def _reserved_for_others(self, own: float) -> float:
        """Tokens that other tenants have reserved and do not use; `own` are this tenant's."""
        reservable = RESERVABLE_FRACTION * self._fleet_tokens
        scale = min(1.0, reservable / self._reserved_tokens) if self._reserved_tokens else 0.0
        return scale * (self._unused_reserved_tokens - own)

    def exceeds_share(self, tenant: str, cost: int) -> bool:
        """Return True if one more request takes its tenant beyond its share of the fleet by weight.

        `cost` is the request's reserved tokens. For a tenant above its share, its requests in
        flight are added. A tenant below its share may ask for `BURST_SHARES` shares at once, so
        that the result is True only if this request alone is larger than that. False while no other
        tenant is active.
        """
        if self._active.keys() <= {tenant}:
            return False
        state = self.get_tenant(tenant)
        requests, tokens, shares = 1, cost, BURST_SHARES
        if state.is_above_share:
            requests, tokens, shares = (
                state.in_flight_load.requests + 1,
                state.in_flight_load.tokens + cost,
                1,
            )
        with_it = dominant_tokens(requests, tokens, self._tokens_per_sequence)
        return with_it * self._active_weight > shares * self._capacity_tokens * state.weight

    def _unfilled_share(self) -> float:
        """Tokens that tenants below their share may still take, up to their weights' part."""
        fraction = 1 - min(
            1.0, self._above_share.weight / max(self._above_share.weight, self._active_weight)
        )
        return max(
            0.0,
            fraction * self._capacity_tokens
            - self._below_share.in_flight_load.dominant_tokens(self._tokens_per_sequence),
        )

    def _headroom(self, demand: DecayingFlow, held: RequestTotals, preempts_batch: bool) -> float:
        """Tokens to keep free for the next arrivals of tenants with this demand and load in flight.

        Arrivals (compound Poisson) take from it; what others release refills it. The fraction of
        arrivals that find it empty falls exponentially with its size (Kingman 1970).
        """
        demand.decay(self._now)
        self._released.decay(self._now)
        refill = self._refill_rate(held)
        empty = MISS_RATE_IF_PREEMPTING if preempts_batch else MISS_RATE_IF_WAITING
        if not refill or demand.effective_requests <= empty:
            return 0.0
        load = demand.rate / (demand.rate + refill)
        if load <= empty:
            return 0.0
        lump = self._released.squares / self._released.sizes
        variance = 2 * demand.square_rate + refill * lump
        return log(load / empty) * variance / (2 * refill)

    def _refill_rate(self, held: RequestTotals) -> float:
        """Tokens per second that others release when they hold all that these tenants do not.

        By Little's law a token is held for (tokens in flight) / (tokens released per second). 0
        while nothing has been released: a fleet without workers has an infinite capacity then.
        """
        in_flight = self._in_flight.dominant_tokens(self._tokens_per_sequence)
        if not in_flight or not self._released.sizes:
            return 0.0
        others = max(0.0, self._capacity_tokens - held.dominant_tokens(self._tokens_per_sequence))
        return others * self._released.rate / in_flight

    @property
    def _capacity_tokens(self) -> float:
        """The whole fleet in tokens: its KV, or what is in flight if that is more.

        Requests in flight may reserve more tokens than the KV has.
        """
        in_flight = self._in_flight.dominant_tokens(self._tokens_per_sequence)
        return max(self._fleet_tokens, in_flight)

    def _group(self, state: TenantState) -> _ShareGroup:
        return self._above_share if state.is_above_share else self._below_share

    def _mark_active(self, tenant: str, weight: float, now: float) -> None:
        """Mark a tenant as active now."""
        _, before = self._active.pop(tenant, (0.0, 0.0))
        self._active[tenant] = now, weight
        self._active_weight += weight - before

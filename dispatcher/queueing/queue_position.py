"""The number of tokens ahead of a tenant's next request in the fair order. Pure.

The virtual token counter (see `fair_queue`) raises the lowest counter first. A tenant with backlog
b, counter c and weight w has been served when its counter has come to e = c + b/w; until then every
other tenant i is served what it has, at most w_i (e - c_i). So the tokens ahead of what the tenant
queues next are the sum of min(b_i, w_i (e - c_i)) over all tenants, itself included: like water
that fills basins up to one level.

A tenant with nothing queued begins at the lowest counter. Ahead of it is one request of each
tenant whose counter is the lowest, too.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from dispatcher.queueing.fair_queue import FairQueue
from streams.subjects import Priority

MAX_TENANTS = 64  # tenants with a wait of their own; the others' backlogs are one sum
WeightOf = Callable[[str], float]


class LaneBacklog(NamedTuple):
    """Sums over one tenant's queued requests of one priority, with the tenant's counter.

    `tokens` are what the requests reserve: prompt tokens plus the most that they may generate. The
    counter is the tenant's service so far over its weight, in virtual tokens.
    """

    tokens: int
    tenant: str
    requests: int
    counter: float

    def final_counter(self, charge_per_token: float, weight: float) -> float:
        """Return the tenant's counter as it will be once all of this backlog has been served.

        `charge_per_token` is the mean service, in virtual tokens, per reserved token; `weight` is
        the tenant's.
        """
        return self.counter + charge_per_token * self.tokens / weight

    def tokens_below(self, level: float, charge_per_token: float, weight: float) -> float:
        """Return how many of its reserved tokens are served before all counters reach `level`.

        `charge_per_token` is the mean service, in virtual tokens, per reserved token; `weight` is
        the tenant's. At most `tokens`; 0 if the tenant's counter is at `level` or above.
        """
        return min(self.tokens, weight * max(0.0, level - self.counter) / charge_per_token)


def collect_backlogs(queue: FairQueue) -> dict[Priority, list[LaneBacklog]]:
    """Return lists of backlogs by priority: what each tenant has queued, one entry per tenant.

    A priority without queued requests has an empty list. Takes time in proportion to all tenants'
    queues.
    """
    found: dict[Priority, dict[str, LaneBacklog]] = {priority: {} for priority in Priority}
    for tenant, priority, tenant_queue in queue.tenant_queues():
        tokens, requests = tenant_queue.tokens, tenant_queue.queued
        if other := found[priority].get(tenant):  # a tenant has a queue for each version it pins
            tokens, requests = tokens + other.tokens, requests + other.requests
        found[priority][tenant] = LaneBacklog(tokens, tenant, requests, queue.counter(tenant))
    return {priority: list(by_tenant.values()) for priority, by_tenant in found.items()}


def count_tokens_ahead_of_newcomer(
    backlogs: Collection[LaneBacklog], lowest_counter: float
) -> float:
    """Return the reserved tokens that are served before a request whose tenant had nothing queued.

    Such a tenant begins at `lowest_counter`; ahead of it is one request of average size from each
    tenant whose counter is no higher.
    """
    return sum(each.tokens / each.requests for each in backlogs if each.counter <= lowest_counter)


def count_tokens_ahead(
    backlogs: Collection[LaneBacklog], weight: WeightOf, charge_per_token: float
) -> Iterator[tuple[str, float]]:
    """Yield each tenant with the reserved tokens that are served before what it queues next.

    Only the `MAX_TENANTS` tenants with the largest backlogs are yielded. The backlogs of all others
    count as ahead of these, so that no wait is estimated too short. `charge_per_token` is the
    service, in virtual tokens, that a reserved token turns out to be.
    """
    heaviest = heapq.nlargest(MAX_TENANTS, backlogs)
    weights = [weight(backlog.tenant) for backlog in heaviest]
    rest = sum(backlog.tokens for backlog in backlogs) - sum(backlog.tokens for backlog in heaviest)
    for backlog, own in zip(heaviest, weights, strict=True):
        level = backlog.final_counter(charge_per_token, own)
        parts = (
            other.tokens_below(level, charge_per_token, theirs)
            for other, theirs in zip(heaviest, weights, strict=True)
        )
        yield backlog.tenant, rest + sum(parts)

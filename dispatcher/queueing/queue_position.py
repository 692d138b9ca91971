"""What is ahead of a tenant's next request: the queue as the fair order will serve it. Pure.

The virtual token counter (see `fair_queue`) raises the lowest counter first. A tenant with backlog
b, counter c and weight w has been served when its counter has come to e = c + b/w; until then every
other tenant i is served what it has, at most w_i (e - c_i). So the tokens ahead of what the tenant
queues next are the sum of min(b_i, w_i (e - c_i)) over all, itself included: water that fills
basins up to one level.

A tenant with nothing queued begins at the lowest counter. Ahead of it is one request of each of
those that stand there, too.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from dispatcher.queueing.fair_queue import FairQueue
from streams.subjects import Priority

MAX_TENANTS = 64  # tenants whose wait is told apart
WeightOf = Callable[[str], float]


class LaneBacklog(NamedTuple):
    """One tenant's backlog of one priority: reserved tokens, and where its counter stands."""

    tokens: int
    tenant: str
    requests: int
    counter: float

    def final_counter(self, charge_per_token: float, weight: float) -> float:
        """Where its counter will be when all of it has been served."""
        return self.counter + charge_per_token * self.tokens / weight

    def tokens_below(self, level: float, charge_per_token: float, weight: float) -> float:
        """The reserved tokens that are served before all counters have come to a level."""
        return min(self.tokens, weight * max(0.0, level - self.counter) / charge_per_token)


def collect_backlogs(queue: FairQueue) -> dict[Priority, list[LaneBacklog]]:
    """Every backlog by priority; it looks at every lane."""
    found: dict[Priority, dict[str, LaneBacklog]] = {priority: {} for priority in Priority}
    for tenant, priority, lane in queue.tenant_queues():
        tokens, requests = lane.tokens, lane.queued
        if other := found[priority].get(tenant):  # a tenant has a lane for each version it pins
            tokens, requests = tokens + other.tokens, requests + other.requests
        found[priority][tenant] = LaneBacklog(tokens, tenant, requests, queue.counter(tenant))
    return {priority: list(theirs.values()) for priority, theirs in found.items()}


def count_tokens_ahead_of_newcomer(basins: Collection[LaneBacklog], lowest_counter: float) -> float:
    """Reserved tokens ahead of a request whose tenant has nothing queued."""
    return sum(each.tokens / each.requests for each in basins if each.counter <= lowest_counter)


def count_tokens_ahead(
    basins: Collection[LaneBacklog], weight: WeightOf, charge_per_token: float
) -> Iterator[tuple[str, float]]:
    """Tenants and the reserved tokens ahead of what they queue next, for the `MOST` heaviest.

    `charge_per_token` turns reserved tokens into those of the counters. What the tenants beyond
    `MOST` have is ahead of all the others, so that nobody's wait is estimated too short.
    """
    heaviest = heapq.nlargest(MAX_TENANTS, basins)
    weights = [weight(basin.tenant) for basin in heaviest]
    rest = sum(basin.tokens for basin in basins) - sum(basin.tokens for basin in heaviest)
    for basin, own in zip(heaviest, weights, strict=True):
        level = basin.final_counter(charge_per_token, own)
        parts = (
            other.tokens_below(level, charge_per_token, theirs)
            for other, theirs in zip(heaviest, weights, strict=True)
        )
        yield basin.tenant, rest + sum(parts)

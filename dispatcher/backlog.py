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
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dispatcher.fair_queue import FairQueue
from streams.subjects import Priority

MOST = 64  # tenants whose wait is told apart


@dataclass(frozen=True, slots=True)
class Basin:
    """One tenant's backlog of one priority: reserved tokens, and where its counter stands."""

    tenant: str
    requests: int
    tokens: int
    counter: float
    weight: float


def basins(queue: FairQueue) -> dict[Priority, list[Basin]]:
    """Every backlog by priority; it looks at every lane."""
    requests = {priority: Counter[str]() for priority in Priority}
    tokens = {priority: Counter[str]() for priority in Priority}
    for tenant, priority, lane in queue.lanes():  # a tenant has a lane for each version it pins
        requests[priority][tenant] += lane.queued
        tokens[priority][tenant] += lane.tokens
    return {
        priority: [
            Basin(name, count, tokens[priority][name], queue.counter(name), queue.weight(name))
            for name, count in lanes.items()
        ]
        for priority, lanes in requests.items()
    }


def ahead_of_newcomer(basins: Iterable[Basin], lowest_counter: float) -> float:
    """Reserved tokens ahead of a request whose tenant has nothing queued."""
    level = (basin for basin in basins if basin.counter <= lowest_counter)
    return sum(basin.tokens / basin.requests for basin in level)


def ahead(basins: Iterable[Basin], charge_per_token: float) -> Iterator[tuple[str, float]]:
    """Tenants and the reserved tokens ahead of what they queue next, the `MOST` longest first.

    `charge_per_token` turns reserved tokens into those of the counters. Tenants beyond `MOST` have
    less: what they have is ahead of all the others, so nobody's wait is estimated too short.
    """

    def level(basin: Basin) -> float:
        return basin.counter + charge_per_token * basin.tokens / basin.weight

    every = [(level(basin), basin.tenant, basin) for basin in basins]
    longest = heapq.nlargest(MOST, every, key=lambda entry: entry[:2])
    rest = sum(basin.tokens for _, _, basin in every) - sum(b.tokens for _, _, b in longest)
    for end, tenant, _ in longest:
        yield tenant, rest + sum(served(other, end, charge_per_token) for *_, other in longest)


def served(basin: Basin, level: float, charge_per_token: float) -> float:
    """The reserved tokens that a basin holds below a level of the counters."""
    return min(basin.tokens, basin.weight * max(0.0, level - basin.counter) / charge_per_token)

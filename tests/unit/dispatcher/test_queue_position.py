"""What is ahead of a tenant: little for a light one, whatever a heavy one has queued."""

import time

import pytest

from dispatcher.queueing.fair_queue import FairQueue
from dispatcher.queueing.queue_position import (
    MAX_TENANTS,
    LaneBacklog,
    collect_backlogs,
    count_tokens_ahead,
    count_tokens_ahead_of_newcomer,
)
from dispatcher.queueing.tenant_queues import QueuedRequest
from streams.subjects import Priority


def basin(tenant: str, tokens: int, counter: float = 0.0) -> LaneBacklog:
    return LaneBacklog(tokens, tenant, max(1, tokens // 100), counter)


def of(*all: LaneBacklog, charge: float = 1.0, **weights: float) -> dict[str, float]:
    return dict(count_tokens_ahead(all, lambda tenant: weights.get(tenant, 1.0), charge))


def test_alone_only_its_own_requests_are_ahead() -> None:
    """A queue of one tenant is first come, first served."""
    assert of(basin("acme", 5000)) == {"acme": 5000}


def test_a_heavy_neighbour_is_ahead_by_as_much_as_one_has_oneself() -> None:
    """They take turns until the lighter one is done; the heavier waits for both."""
    assert of(basin("heavy", 1_000_000), basin("light", 300)) == {
        "heavy": 1_000_300,
        "light": 600,
    }


def test_weights_are_shares() -> None:
    """While the one with weight 3 is served 300, the other is served 100."""
    found = of(basin("acme", 300), basin("other", 10_000), acme=3.0)
    assert found["acme"] == pytest.approx(400)


def test_whoever_has_been_served_less_is_ahead_first() -> None:
    """The counters' distance counts in what a reserved token is charged."""
    found = of(basin("acme", 100, counter=1000.0), basin("other", 10_000), charge=2.0)
    assert found["acme"] == pytest.approx(100 + (1000 + 2 * 100) / 2)


def test_tenants_that_are_not_told_apart_are_ahead_of_all_the_others() -> None:
    """The answer is bounded, and never too short for those that are in it."""
    many = [basin(f"t{i}", 100 + i) for i in range(10_000)]
    found = of(*many)
    assert len(found) == MAX_TENANTS
    assert found["t9999"] == pytest.approx(sum(each.tokens for each in many), rel=1e-9)
    assert "t0" not in found


def test_a_newcomer_waits_for_one_request_of_those_at_its_level() -> None:
    """A thousand tenants with one request each are a queue, too."""
    level = [LaneBacklog(200, f"t{i}", 2, 7.0) for i in range(1000)]
    assert (
        count_tokens_ahead_of_newcomer([*level, LaneBacklog(900, "spent", 9, 8.0)], 7.0)
        == 100 * 1000
    )


def test_the_order_is_that_of_the_fair_queue() -> None:
    """What is said to be ahead of a tenant's last request is what is really popped before it."""
    queue, now = FairQueue(), time.time()
    for number in range(600):
        tenant = "light" if number % 30 == 0 else "heavy"
        queue.enqueue(_queued(number, tenant), now)
    told = dict(
        count_tokens_ahead(
            collect_backlogs(queue)[Priority.STANDARD], queue.weight, charge_per_token=1.5
        )
    )
    popped, last = 0, {}
    while item := queue.peek(now):
        queue.reserve(item, now, item.priority)
        popped += item.cost
        last[item.tenant] = popped
    assert told["light"] == pytest.approx(last["light"], abs=200)
    assert told["heavy"] == pytest.approx(last["heavy"])


def _queued(number: int, tenant: str) -> QueuedRequest:
    return QueuedRequest(
        request_id=f"r{number}",
        tenant=tenant,
        priority=Priority.STANDARD,
        prompt_tokens=50,
        cost=100,
        accepted=0,
        deadline=2**62,
        route="",
        version="",
        seq=number,
        reply="",
    )

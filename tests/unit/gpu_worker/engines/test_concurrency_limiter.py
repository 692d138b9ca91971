"""The gate: how many calls at once, and what is announced of it."""

from collections import deque
from heapq import heappop, heappush
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.remote.backoff import Backoff
from gpu_worker.engines.remote.call_errors import RetryableError
from gpu_worker.engines.remote.circuit_breaker import FOREVER, CircuitBreaker
from gpu_worker.engines.remote.concurrency_limiter import ConcurrencyLimiter

THROTTLED = RetryableError("429", "busy", alive=True, throttles=True)
BUSY = RetryableError("429", "busy", alive=True, throttles=True, retry_after=2.0)
DOWN = RetryableError("unreachable", "down")


def test_no_more_calls_than_the_limit() -> None:
    """The next one begins when one has ended."""
    gate = ConcurrencyLimiter(2, CircuitBreaker())
    first, _ = gate.acquire(0.0), gate.acquire(0.0)
    assert gate.wait_seconds(0.0) == FOREVER
    gate.release(first)
    assert gate.wait_seconds(0.0) == 0


def test_a_retry_after_holds_back_every_call_and_all_credit() -> None:
    """The server has said when it wants to be asked again, and not only by whom."""
    gate = ConcurrencyLimiter(8, CircuitBreaker())
    call = gate.acquire(0.0)
    gate.record_failure(call, BUSY, 0.0)
    gate.release(call)
    assert (gate.wait_seconds(0.5), gate.capacity(0.5)) == (1.5, 0)
    assert (gate.wait_seconds(2.0), gate.capacity(2.0)) == (0.0, 7)
    assert gate.breaker_state(2.0) == "closed"


def test_a_round_that_is_all_refused_halves_the_limit_and_success_raises_it_again() -> None:
    """Fewer refusals lower it by less: their share tells how much too many calls there were."""
    gate = ConcurrencyLimiter(8, CircuitBreaker())
    for call in [gate.acquire(0.0) for _ in range(8)]:
        gate.record_failure(call, BUSY, 0.1)
        gate.release(call)
    assert gate.capacity(3.0) == 4
    for _ in range(40):
        call = gate.acquire(3.0)
        gate.record_answer(call)
        gate.release(call)
    assert gate.capacity(3.0) == 8


def test_the_limit_stays_at_what_the_server_can_and_tries_more_now_and_then() -> None:
    """A refusal beside more calls than were ever answered tells where the ceiling is."""
    gate = ConcurrencyLimiter(8, CircuitBreaker())
    calls = [gate.acquire(0.0) for _ in range(8)]
    for call in calls[:3]:
        gate.record_answer(call)
    for call in calls[3:]:
        gate.record_failure(call, THROTTLED, 0.0)
    for call in calls:
        gate.release(call)
    assert gate.capacity(0.0) == 3
    for rounds, capacity in ((9, 3), (3, 4)):
        for _ in range(3 * rounds):
            call = gate.acquire(0.0)
            gate.record_answer(call)
            gate.release(call)
        assert gate.capacity(0.0) == capacity


def run_server(capacity: int, refused_share: float, items: int = 4000) -> tuple[float, float]:
    """Run items through a server in virtual time; the share of it that was used, calls per item.

    It answers in log-normal times around 0.1 s, and refuses what is beyond its capacity, and a
    share of everything.
    """
    draw, gate, backoff = Random(1), ConcurrencyLimiter(16, CircuitBreaker()), Backoff()
    now = busy_seconds = 0.0
    calls = running = 0
    failures = [0] * items
    ready, order = deque(range(items)), count()
    events: list[tuple[float, int, str, int, int]] = []
    while items:
        while ready and gate.wait_seconds(now) == 0:
            item, call, calls = ready.popleft(), gate.acquire(now), calls + 1
            if running >= capacity or draw.random() < refused_share:
                heappush(events, (now + 0.003, next(order), "refused", item, call))
                continue
            seconds = 0.1 * draw.lognormvariate(0, 0.6)
            running, busy_seconds = running + 1, busy_seconds + seconds
            heappush(events, (now + seconds, next(order), "answered", item, call))
        now, _, kind, item, call = heappop(events)
        if kind == "again":
            ready.append(item)
            continue
        if kind == "answered":
            running, items = running - 1, items - 1
            gate.record_answer(call)
        else:
            gate.record_failure(call, THROTTLED, now)
            failures[item] += 1
            delay = backoff.delay_seconds(failures[item], draw.random())
            heappush(events, (now + delay, next(order), "again", item, call))
        gate.release(call)
    return busy_seconds / now / min(capacity, 16), calls / len(failures)


@pytest.mark.parametrize(
    ("capacity", "refused_share", "most_calls"),
    [(10, 0.0, 1.02), (16, 0.05, 1.02 / 0.95), (99, 0.05, 1.02 / 0.95)],
)
def test_a_server_is_used_and_not_asked_in_vain(
    capacity: int, refused_share: float, most_calls: float
) -> None:
    """Rule of a server: it refuses what is too much for it, or some calls at any load."""
    used, calls_per_item = run_server(capacity, refused_share)
    assert used >= 0.95
    assert calls_per_item <= most_calls


def test_a_server_that_is_down_gets_no_work_but_one_request_to_probe_with() -> None:
    """What is not announced stays in the queue, or goes to another worker."""
    gate = ConcurrencyLimiter(8, CircuitBreaker(failures=1, cooldown_seconds=1.0))
    call = gate.acquire(0.0)
    gate.record_failure(call, DOWN, 0.0)
    gate.release(call)
    assert [gate.capacity(now) for now in (0.0, 0.9, 1.0)] == [0, 0, 1]
    probe = gate.acquire(1.0)
    gate.record_answer(probe)
    assert gate.capacity(1.0) == 8


@given(st.lists(st.tuples(st.sampled_from(["ok", "busy", "down"]), st.floats(0, 5)), max_size=80))
def test_there_is_always_a_time_at_which_a_call_may_begin(events: list[tuple[str, float]]) -> None:
    """Whatever the server does, requests do not wait for nothing, nor beyond the limit."""
    gate, now = ConcurrencyLimiter(4, CircuitBreaker(failures=2)), 0.0
    for event, seconds in events:
        now += seconds
        wait = gate.wait_seconds(now)
        assert wait <= 30.0
        now += wait
        call = gate.acquire(now)
        if event == "ok":
            gate.record_answer(call)
        else:
            gate.record_failure(call, BUSY if event == "busy" else DOWN, now)
        gate.release(call)
        assert 0 <= gate.capacity(now) <= 4

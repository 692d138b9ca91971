"""The circuit breaker: it opens on failures in a row, probes with one call, and closes again."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.remote.circuit_breaker import FOREVER, CircuitBreaker

FAILURES, COOLDOWN, MOST = 3, 1.0, 8.0
EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "ok", "fail", "leave"]), st.floats(0, 3)), max_size=60
)


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker(FAILURES, COOLDOWN, MOST)
    for call in range(FAILURES):
        breaker.acquire(call, 0.0)
        breaker.record_failure(call, 0.0)
    return breaker


def test_it_opens_when_failures_come_in_a_row() -> None:
    """One success between them shows a server that works."""
    breaker = CircuitBreaker(FAILURES, COOLDOWN, MOST)
    for call, works in enumerate([False, False, True, False, False]):
        breaker.acquire(call, 0.0)
        breaker.record_success(call) if works else breaker.record_failure(call, 0.0)
    assert breaker.state(0.0) == "closed"
    breaker.record_failure(9, 0.0)
    assert breaker.state(0.0) == "open"


def test_it_lets_one_probe_through_after_the_cooldown() -> None:
    """A server that comes back is not met by everything that has waited."""
    breaker = opened()
    assert breaker.wait_seconds(0.4) == COOLDOWN - 0.4
    assert breaker.wait_seconds(COOLDOWN) == 0
    breaker.acquire(10, COOLDOWN)
    assert breaker.wait_seconds(COOLDOWN) == FOREVER
    breaker.record_success(10)
    assert (breaker.state(COOLDOWN), breaker.wait_seconds(COOLDOWN)) == ("closed", 0)


def test_each_failed_probe_doubles_the_cooldown_up_to_a_limit() -> None:
    """A server that is away for an hour is not asked every second."""
    breaker, now, waits = opened(), 0.0, []
    for call in range(10, 16):
        now += breaker.wait_seconds(now)
        breaker.acquire(call, now)
        breaker.record_failure(call, now)
        waits.append(breaker.wait_seconds(now))
    assert waits == [2, 4, 8, 8, 8, 8]


def test_a_probe_that_is_given_up_makes_room_for_the_next() -> None:
    """Its client may have left: that says nothing about the server."""
    breaker = opened()
    breaker.acquire(10, COOLDOWN)
    breaker.release(10)
    assert breaker.wait_seconds(COOLDOWN) == 0


def test_what_began_earlier_neither_closes_nor_prolongs() -> None:
    """Only the probe tells how the server is now."""
    breaker = opened()
    breaker.acquire(10, COOLDOWN)
    breaker.record_success(1)
    breaker.record_failure(2, COOLDOWN)
    assert breaker.state(COOLDOWN) == "half_open"
    assert breaker.wait_seconds(COOLDOWN) == FOREVER


@given(EVENTS)
def test_it_never_blocks_for_ever_and_never_probes_twice(events: list[tuple[str, float]]) -> None:
    """Whatever happens: with no call out it is free within the longest cool-down, and while it is
    not closed at most one call is let in."""
    breaker, now, out, number = CircuitBreaker(FAILURES, COOLDOWN, MOST), 0.0, set[int](), 0
    for event, seconds in events:
        now += seconds
        was_closed = breaker.state(now) == "closed"
        if event == "begin" and breaker.wait_seconds(now) == 0:
            number += 1
            breaker.acquire(number, now)
            assert was_closed or breaker.wait_seconds(now) == FOREVER
            out.add(number)
        elif out and event != "begin":
            call = out.pop()
            if event == "ok":
                breaker.record_success(call)
            elif event == "fail":
                breaker.record_failure(call, now)
            breaker.release(call)
        assert out or breaker.wait_seconds(now) <= MOST

"""The circuit breaker: it opens on failures in a row, probes with one call, and closes again."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.remote.breaker import FOREVER, Breaker

FAILURES, COOLDOWN, MOST = 3, 1.0, 8.0
EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "ok", "fail", "leave"]), st.floats(0, 3)), max_size=60
)


def opened() -> Breaker:
    breaker = Breaker(FAILURES, COOLDOWN, MOST)
    for call in range(FAILURES):
        breaker.begin(call, 0.0)
        breaker.failed(call, 0.0)
    return breaker


def test_it_opens_when_failures_come_in_a_row() -> None:
    """One success between them shows a server that works."""
    breaker = Breaker(FAILURES, COOLDOWN, MOST)
    for call, works in enumerate([False, False, True, False, False]):
        breaker.begin(call, 0.0)
        breaker.succeeded(call) if works else breaker.failed(call, 0.0)
    assert breaker.state(0.0) == "closed"
    breaker.failed(9, 0.0)
    assert breaker.state(0.0) == "open"


def test_it_lets_one_probe_through_after_the_cooldown() -> None:
    """A server that comes back is not met by everything that has waited."""
    breaker = opened()
    assert breaker.wait(0.4) == COOLDOWN - 0.4
    assert breaker.wait(COOLDOWN) == 0
    breaker.begin(10, COOLDOWN)
    assert breaker.wait(COOLDOWN) == FOREVER
    breaker.succeeded(10)
    assert (breaker.state(COOLDOWN), breaker.wait(COOLDOWN)) == ("closed", 0)


def test_each_failed_probe_doubles_the_cooldown_up_to_a_limit() -> None:
    """A server that is away for an hour is not asked every second."""
    breaker, now, waits = opened(), 0.0, []
    for call in range(10, 16):
        now += breaker.wait(now)
        breaker.begin(call, now)
        breaker.failed(call, now)
        waits.append(breaker.wait(now))
    assert waits == [2, 4, 8, 8, 8, 8]


def test_a_probe_that_is_given_up_makes_room_for_the_next() -> None:
    """Its client may have left: that says nothing about the server."""
    breaker = opened()
    breaker.begin(10, COOLDOWN)
    breaker.left(10)
    assert breaker.wait(COOLDOWN) == 0


def test_what_began_earlier_neither_closes_nor_prolongs() -> None:
    """Only the probe tells how the server is now."""
    breaker = opened()
    breaker.begin(10, COOLDOWN)
    breaker.succeeded(1)
    breaker.failed(2, COOLDOWN)
    assert breaker.state(COOLDOWN) == "half_open"
    assert breaker.wait(COOLDOWN) == FOREVER


@given(EVENTS)
def test_it_never_blocks_for_ever_and_never_probes_twice(events: list[tuple[str, float]]) -> None:
    """Whatever happens: with no call out it is free within the longest cool-down, and while it is
    not closed at most one call is let in."""
    breaker, now, out, number = Breaker(FAILURES, COOLDOWN, MOST), 0.0, set[int](), 0
    for event, seconds in events:
        now += seconds
        was_closed = breaker.state(now) == "closed"
        if event == "begin" and breaker.wait(now) == 0:
            number += 1
            breaker.begin(number, now)
            assert was_closed or breaker.wait(now) == FOREVER
            out.add(number)
        elif out and event != "begin":
            call = out.pop()
            if event == "ok":
                breaker.succeeded(call)
            elif event == "fail":
                breaker.failed(call, now)
            breaker.left(call)
        assert out or breaker.wait(now) <= MOST

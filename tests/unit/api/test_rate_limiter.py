"""A pace: a burst, then evenly spaced, and never more in any second."""

import pytest

from api.rate_limiter import RateLimiter


def test_a_burst_goes_at_once_and_the_rest_evenly() -> None:
    """Honest clients come in bursts; what a flood may cost is known."""
    pace = RateLimiter(10)
    assert [pace.reserve(100.0) for _ in range(10)] == [0.0] * 10
    waits = [pace.reserve(100.0) for _ in range(3)]
    assert waits == pytest.approx([0.1, 0.2, 0.3])


def test_who_waited_may_burst_again() -> None:
    """It is never more than one burst, however long nothing came."""
    pace = RateLimiter(10, burst=2)
    assert [pace.reserve(0.0), pace.reserve(0.0)] == [0.0, 0.0]
    assert pace.reserve(0.0) > 0
    assert [pace.reserve(1000.0), pace.reserve(1000.0)] == [0.0, 0.0]
    assert pace.reserve(1000.0) > 0


def test_a_new_pace_counts_from_now_on() -> None:
    """An operator changes a limit while connections are open."""
    pace = RateLimiter(1)
    assert [pace.reserve(0.0) for _ in range(3)] == [0.0, 1.0, 2.0]
    pace.set_rate(100)
    assert pace.reserve(2.0) == pytest.approx(0.0, abs=0.02)


def test_what_counts_for_several_waits_for_all_of_them() -> None:
    """A large frame is as much work as many small ones."""
    pace = RateLimiter(10)
    assert pace.reserve(100.0, 8) == 0.0
    assert pace.reserve(100.0, 5) == pytest.approx(0.3)
    assert pace.reserve(100.0) == pytest.approx(0.4)

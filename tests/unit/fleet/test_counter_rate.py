"""Rates of what others only count up."""

import pytest

from fleet.signals.counter_rate import STEPS, CounterRate


def test_a_rate_is_known_from_the_second_value_on() -> None:
    """Counts from before the first value have no time."""
    rate = CounterRate(60)
    rates = []
    for now, counters in ((100, (500, 9)), (102, (510, 13))):
        rate.record(now, *counters)
        rates.append(rate.per_second)
    assert rates == [None, (5.0, 2.0)]
    assert rate.growth == (10, 4)


def test_it_is_that_of_the_last_seconds() -> None:
    """A burst an hour ago asks for nothing now."""
    rate = CounterRate(10)
    for now, count in ((100, 0), (101, 1000), (150, 1000), (160, 1020)):
        rate.record(now, count)
    assert rate.per_second == (2.0,)


def test_an_owner_that_begins_anew_has_no_negative_rate() -> None:
    """Another leader, or a gateway that was started again, counts from 0."""
    rate = CounterRate(60)
    rates = []
    for now, count in ((100, 50), (101, 70), (102, 3), (103, 5)):
        rate.record(now, count)
        rates.append(rate.per_second)
    assert rates == [None, (20.0,), None, (2.0,)]


def test_few_values_are_kept_however_many_come() -> None:
    """A leader reports five times a second, for hundreds of models."""
    rate = CounterRate(60)
    for step in range(10_000):
        rate.record(step * 0.2, step)
    assert len(rate._values) <= 2 * STEPS + 2
    assert rate.per_second == pytest.approx((5.0,))

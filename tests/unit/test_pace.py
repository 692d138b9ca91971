"""The pace of a fleet: learned while it is busy, and from the first seconds on."""

import pytest

from dispatcher.pace import SMOOTHING_SECONDS, Pace


def busy(pace: Pace, seconds: float, per_second: int, start: float = 0.0) -> float:
    steps = int(seconds * 5)
    for step in range(steps):
        pace.tick(start + step * 0.2, backlogged=True)
        pace.release(per_second // 5)
    pace.tick(start + seconds, backlogged=True)
    return start + seconds


def test_nothing_is_known_at_first() -> None:
    """A guess would refuse requests, or accept them, for no reason."""
    pace = Pace()
    assert pace.wait_seconds(1) is None
    pace.tick(0, backlogged=True)
    pace.tick(0.2, backlogged=True)  # nothing has been released yet
    assert pace.wait_seconds(1) is None


def test_nobody_ahead_means_no_wait() -> None:
    """Whatever the pace is."""
    assert Pace().wait_seconds(0) == 0.0


@pytest.mark.parametrize("seconds", [0.4, 1.0, 30.0])
def test_the_pace_is_right_as_soon_as_it_is_known(seconds: float) -> None:
    """An average that starts at zero would estimate long waits and turn clients away."""
    pace = Pace()
    busy(pace, seconds, 1000)
    assert pace.wait_seconds(5000) == pytest.approx(5.0)


def test_an_idle_fleet_teaches_nothing() -> None:
    """It serves little because it is asked little."""
    pace = Pace()
    end = busy(pace, 10, 1000)
    for step in range(1, 500):
        pace.release(1)
        pace.tick(end + step * 0.2, backlogged=False)
    assert pace.wait_seconds(1000) == pytest.approx(1.0)


def test_a_new_pace_replaces_the_old_one() -> None:
    """A worker that joins halves the wait within seconds."""
    pace = Pace()
    end = busy(pace, 20, 1000)
    busy(pace, 4 * SMOOTHING_SECONDS, 2000, start=end)
    assert pace.wait_seconds(2000) == pytest.approx(1.0, rel=0.05)

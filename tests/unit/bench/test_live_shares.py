"""What the live benches make of a run's fates."""

from bench.live.isolation import shares
from bench.simulation.runs import Outcome
from simulation.request import RequestSpec, SimulatedRequest

OF_FOUR, OF_ONE = RequestSpec(0.0, "four", 100, 150), RequestSpec(0.0, "one", 100, 500)


def test_a_share_is_what_was_seen_once_things_were_level() -> None:
    """An empty fleet takes whatever comes, and who gets less has more under way at the end."""
    before = SimulatedRequest(OF_FOUR, "a", first=1.0, ended=29.0, generated=150)
    across = SimulatedRequest(OF_FOUR, "b", first=20.0, ended=40.0, generated=150)
    under_way = SimulatedRequest(OF_ONE, "c", first=100.0, generated=50)
    waiting = SimulatedRequest(OF_ONE, "d")
    got = shares(Outcome([before, across, under_way, waiting], (), 0.0, 150.0, 0), 150.0)
    assert got == {"four": 400 / 2, "one": 200}

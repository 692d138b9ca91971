"""Names remembered for a while, and not for longer."""

from dispatcher.estimate import ttl_set
from dispatcher.estimate.ttl_set import TtlSet


def test_a_name_is_forgotten_after_its_time() -> None:
    """A cancel may overtake its request by seconds, not by minutes."""
    names = TtlSet(seconds=30)
    names.add("a", now=0)
    names.add("b", now=20)
    names.expire(now=31)
    assert "a" not in names
    assert "b" in names


def test_a_name_that_comes_again_is_remembered_from_then_on() -> None:
    """A gateway repeats its cancel until it has worked."""
    names = TtlSet(seconds=30)
    names.add("a", now=0)
    names.add("a", now=20)
    names.expire(now=40)
    assert "a" in names


def test_their_number_is_bounded() -> None:
    """Anybody who may cancel could fill the memory otherwise; the oldest go first."""
    names = TtlSet(seconds=30)
    for i in range(ttl_set.MAX_MEMBERS + 1):
        names.add(str(i), now=0)
    assert "0" not in names
    assert str(ttl_set.MAX_MEMBERS) in names

"""Groups of items: full or in time, and a window that leaves what the server needs of the goal."""

from heapq import heappop, heappush
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.remote.item_groups import ItemGroups


def groups(size: int = 4, max_seconds: float = 1.0, *times: float) -> ItemGroups[str]:
    made: ItemGroups[str] = ItemGroups(size, max_seconds)
    for seconds in times:
        made.times.add(seconds)
    return made


def test_a_full_group_is_due_at_once() -> None:
    """Inputs of one request count each."""
    made = groups(4)
    made.add("a", 1, 10.0, None)
    assert (made.due_at(), made.pop_due(10.9)) == (11.0, [])
    made.add("b", 3, 10.5, None)
    assert made.pop_due(10.5) == ["a", "b"]
    assert made.due_at() is None


def test_a_group_of_one_never_waits() -> None:
    """A size of one turns groups off."""
    made = groups(1)
    made.add("a", 1, 10.0, None)
    assert made.pop_due(10.0) == ["a"]


@pytest.mark.parametrize(
    ("p95", "window"), [(0.2, 0.4), (0.6, 0.2), (1.0, 0.0), (5.0, 0.0), (None, 0.0)]
)
def test_the_window_is_half_of_what_the_server_leaves_of_the_goal(
    p95: float | None, window: float
) -> None:
    """None at all while the server is too slow, or not measured yet."""
    made = groups(4, 0.4, *([p95] if p95 else []))
    assert made.window_seconds(1.0) == pytest.approx(window)
    assert made.window_seconds(None) == 0.4


def test_the_first_to_run_out_of_time_decides_and_goes_first() -> None:
    """The others of its group need not wait any longer, either."""
    made = groups(4, 1.0, 0.1)
    made.add("patient", 1, 10.0, None)
    made.add("urgent", 1, 10.1, 10.4)
    assert made.due_at() == pytest.approx(10.2)
    assert made.pop_due(10.25) == ["urgent", "patient"]


def test_what_was_cancelled_is_not_waited_for() -> None:
    made = groups()
    made.add("a", 1, 10.0, None)
    made.remove("a")
    made.remove("a")
    assert made.due_at() is None


@given(st.lists(st.floats(0, 5), min_size=1, max_size=300), st.floats(0, 10))
def test_a_window_never_takes_what_the_server_needs(times: list[float], goal: float) -> None:
    """Nor more than it may at most."""
    made = groups(4, 1.0, *times)
    window = made.window_seconds(goal)
    assert 0 <= window <= 1.0
    assert window + made.times.p95 <= max(goal, made.times.p95)


def count_late(goal: float, items: int = 4000) -> tuple[int, int]:
    """Run items in virtual time, by a server that becomes slower; late ones, and groups.

    Its times are log-normal, around 0.05 s at first and 0.2 s at last.
    """
    draw, made = Random(1), ItemGroups[tuple[float, int]](8, 10.0)
    now, begun, late = 0.0, 0, 0
    ends: list[tuple[float, float]] = []  # when items are answered, and how long that took

    def begin(at: float) -> None:
        nonlocal begun, late
        group = made.pop_due(at)
        begun += bool(group)
        for arrived, index in group:
            seconds = (0.05 + 0.15 * index / items) * draw.lognormvariate(0, 0.3)
            late += at - arrived + seconds > goal
            heappush(ends, (at + seconds, seconds))

    for number in range(items):
        now += draw.expovariate(100)
        if (due := made.due_at()) is not None and due <= now:
            begin(due)
        while ends and ends[0][0] <= now:
            made.times.add(heappop(ends)[1])
        made.add((now, number), 1, now, now + goal)
        begin(now)
    return late, begun


@pytest.mark.parametrize("goal", [0.3, 0.45, 1.0])
def test_a_goal_holds_however_slow_the_server_becomes(goal: float) -> None:
    """At the 95th percentile, as far as the server alone would hold it; and there are groups."""
    late, begun = count_late(goal, 4000)
    assert late <= 0.05 * 4000
    assert begun < 4000 / 3

"""A batch is due when it is full, when its oldest item has waited, or before a deadline."""

import math

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.batcher import Batcher


def test_a_full_batch_is_due_at_once() -> None:
    """Waiting longer could not make it better."""
    batcher: Batcher[int] = Batcher(size=3, wait=1, margin=0)
    for item in range(4):
        batcher.add(item, now=10)
    assert batcher.due_at() == -math.inf
    assert batcher.take(now=10) == [0, 1, 2]
    assert batcher.take(now=10) == []


def test_the_oldest_item_waits_at_most_its_time() -> None:
    """Its latency is bounded however quiet it is."""
    batcher: Batcher[int] = Batcher(size=3, wait=1, margin=0)
    batcher.add(0, now=10)
    batcher.add(1, now=10.9)
    assert batcher.due_at() == 11
    assert batcher.take(now=10.99) == []
    assert batcher.take(now=11) == [0, 1]


def test_a_deadline_makes_a_batch_due_early() -> None:
    """With a margin for the work; a deadline in the past does not come before its arrival."""
    batcher: Batcher[int] = Batcher(size=9, wait=10, margin=0.2)
    batcher.add(0, now=10)
    batcher.add(1, now=10, deadline=11)
    assert batcher.due_at() == 10.8
    batcher.add(2, now=10.5, deadline=3)
    assert batcher.due_at() == 10.5
    assert batcher.take(now=10.5) == [0, 1, 2]


def test_an_empty_batcher_is_never_due() -> None:
    """Nor one whose items were dropped."""
    batcher: Batcher[int] = Batcher(size=1, wait=0, margin=0)
    assert batcher.due_at() is None
    batcher.add(1, now=0)
    batcher.drop(lambda item: item == 1)
    assert batcher.due_at() is None
    assert batcher.take(now=99) == []


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 5), st.none() | st.floats(0, 9)), min_size=1, max_size=40
)


@given(ARRIVALS, st.integers(1, 8), st.floats(0, 2))
def test_items_leave_in_order_and_in_time(
    arrivals: list[tuple[float, float | None]], size: int, wait: float
) -> None:
    """Taken as soon as due, none waits longer than it may, and no batch is too large."""
    batcher: Batcher[int] = Batcher(size, wait, margin=0.1)
    now = 0.0
    latest: list[float] = []
    out: list[int] = []

    def take_until(time: float) -> None:
        while (due := batcher.due_at()) is not None and due <= time:
            at = max(due, now)
            batch = batcher.take(at)
            assert 0 < len(batch) <= size
            assert all(at <= latest[item] for item in batch)
            out.extend(batch)

    for number, (gap, deadline) in enumerate(arrivals):
        take_until(now + gap)
        now += gap
        batcher.add(number, now, None if deadline is None else now + deadline)
        latest.append(now + wait)
        take_until(now)
    take_until(math.inf)
    assert out == list(range(len(arrivals)))

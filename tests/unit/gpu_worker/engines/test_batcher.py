"""A batch is due when it is full, when waiting would not pay, or before somebody's time is up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.unary.batch_time_model import BatchTimeModel
from gpu_worker.engines.unary.batcher import Batcher

OVERHEAD, PER_TOKEN = 0.1, 0.001
COMPUTE = BatchTimeModel((tokens, OVERHEAD + PER_TOKEN * tokens) for tokens in (10, 1000))


def batcher_of(size: int = 8, max_tokens: int = 1000, margin: float = 0.0) -> Batcher[int]:
    return Batcher(size, max_tokens, COMPUTE, margin)


def busy(gap: float, size: int = 8) -> tuple[Batcher[int], float]:
    """An empty batcher that has seen one input of ten tokens each `gap` seconds, and the time."""
    batcher, now = batcher_of(size), 0.0
    for _ in range(100):
        now += gap
        batcher.add([(0, 10)], now)
        batcher.pop_due(math.inf)
    return batcher, now


def test_a_full_batch_is_due_at_once() -> None:
    """Waiting longer could not make it better."""
    batcher, now = busy(gap=0.001, size=3)
    batcher.add([(item, 10) for item in range(4)], now)
    assert batcher.due_at() == -math.inf
    assert batcher.pop_due(now) == [0, 1, 2]


def test_a_batch_is_full_by_tokens_too() -> None:
    """It is a micro-batch of its own: company would run after it."""
    batcher, now = busy(gap=0.001)
    batcher.add([(0, 1000)], now)
    assert batcher.pop_due(now) == [0]


def test_an_idle_engine_does_not_wait() -> None:
    """For whom? The first request, and one after a long silence, run at once."""
    batcher = batcher_of()
    batcher.add([(0, 10)], now=5)
    assert batcher.pop_due(now=5) == [0]
    batcher.add([(1, 10)], now=100)
    assert batcher.pop_due(now=100) == [1]


def test_one_that_comes_often_is_waited_for() -> None:
    """It saves a whole micro-batch's overhead, and delays one input by a little."""
    batcher, now = busy(gap=0.02)
    batcher.add([(0, 10)], now + 0.02)
    assert batcher.pop_due(now + 0.02) == []
    batcher.add([(1, 10)], now + 0.04)
    patience = (OVERHEAD - 2 * PER_TOKEN * 10) / 3
    assert batcher.due_at() == pytest.approx(now + 0.04 + patience)
    assert batcher.pop_due(now + 0.04 + patience) == [0, 1]


def test_the_more_wait_the_shorter() -> None:
    """Each is delayed, and all of them together by more than one overhead in the end."""
    batcher, now = busy(gap=0.02)
    batcher.add([(item, 10) for item in range(5)], now)
    assert batcher.pop_due(now) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("left", [0.2, 0.125, 0.1, -3.0])
def test_nobody_waits_beyond_its_own_time(left: float) -> None:
    """The batch begins early enough to be computed, with a margin, or at once."""
    batcher, now = Batcher[int](8, 1000, COMPUTE, margin=0.01), 0.0
    for _ in range(100):
        now += 0.001
        batcher.add([(0, 10)], now)
        batcher.pop_due(math.inf)
    batcher.add([(0, 10)], now, latest=now + left)
    due = batcher.due_at()
    assert due is not None
    assert due <= max(now, now + left - COMPUTE.predict_seconds(10) - 0.01) + 1e-9


def test_who_has_least_time_goes_first() -> None:
    """Short latency goals get ahead of a backlog; those without a time leave as they came."""
    batcher = batcher_of(size=2)
    for item, latest in enumerate((None, 9.0, 5.0, None, 9.0, 5.0)):
        batcher.add([(item, 1)], 0, latest)
    assert [batcher.pop_due(9) for _ in range(3)] == [[2, 5], [1, 4], [0, 3]]


def test_an_empty_batcher_is_never_due() -> None:
    """Nor one whose items were dropped."""
    batcher = batcher_of(size=1)
    assert batcher.due_at() is None
    batcher.add([(1, 10)], now=0)
    batcher.remove_if(lambda item: item == 1)
    assert batcher.due_at() is None
    assert batcher.pop_due(now=99) == []


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 0.3), st.none() | st.floats(0, 9), st.integers(1, 300)),
    min_size=1,
    max_size=40,
)


@given(ARRIVALS, st.integers(1, 8))
def test_all_items_leave_in_time(
    arrivals: list[tuple[float, float | None, int]], size: int
) -> None:
    """Taken as soon as due: no batch is too large, and nobody waits longer than an overhead."""
    batcher = batcher_of(size, margin=0.1)
    now = 0.0
    came: list[float] = []
    out: list[int] = []

    def take_until(time: float) -> None:
        while (due := batcher.due_at()) is not None and due <= time:
            at = max(due, came[-1])
            batch = batcher.pop_due(at)
            assert 0 < len(batch) <= size
            assert all(at - came[item] <= size * OVERHEAD for item in batch)
            out.extend(batch)

    for number, (gap, left, tokens) in enumerate(arrivals):
        take_until(now + gap)
        now += gap
        came.append(now)
        batcher.add([(number, tokens)], now, None if left is None else now + left)
        take_until(now)
    take_until(math.inf)
    assert sorted(out) == list(range(len(arrivals)))

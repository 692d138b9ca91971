"""What a micro-batch will take, from what others took."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.unary.batch_time_model import BatchTimeModel

SAMPLES = st.lists(st.tuples(st.integers(1, 8192), st.floats(0, 10)), max_size=30)


def law(tokens: int, speed: float = 1.0) -> tuple[int, float]:
    """5 ms for a micro-batch and 0.1 ms for each of its tokens."""
    return tokens, (0.005 + 0.0001 * tokens) / speed


def test_overhead_and_slope_are_found() -> None:
    """From warm-up alone, and kept under a steady load of one size, which cannot tell them."""
    compute = BatchTimeModel(map(law, (8, 128, 512, 2048)))
    for _ in range(1000):
        compute.add_sample(*law(64))
    assert compute.overhead == pytest.approx(0.005)
    assert compute.per_token == pytest.approx(0.0001)
    assert compute.overhead_tokens == pytest.approx(50)


def test_a_machine_that_has_become_slow_is_noticed() -> None:
    """Estimates follow what runs now."""
    compute = BatchTimeModel(map(law, (8, 128, 512)))
    for _ in range(100):
        for tokens in (16, 256):
            compute.add_sample(*law(tokens, speed=0.5))
    assert compute.predict_seconds(256) == pytest.approx(law(256, 0.5)[1], rel=0.1)


def test_what_nobody_has_measured_takes_no_time() -> None:
    """An estimate of zero never makes anybody wait."""
    assert BatchTimeModel().predict_seconds(1000) == 0
    assert BatchTimeModel([(10, 0.0)]).overhead_tokens == float("inf")


@given(SAMPLES, SAMPLES)
def test_estimates_are_never_negative_and_grow_with_tokens(
    warm_up: list[tuple[int, float]], later: list[tuple[int, float]]
) -> None:
    """Whatever noise came in."""
    compute = BatchTimeModel(warm_up)
    for tokens, seconds in later:
        compute.add_sample(tokens, seconds)
    found = [compute.predict_seconds(tokens) for tokens in (0, 1, 10, 1000, 8192)]
    assert found[0] >= 0
    assert all(a <= b for a, b in pairwise(found))
    assert max(found) < float("inf")

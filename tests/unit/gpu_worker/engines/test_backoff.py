"""The back-off: exponential, capped, with full jitter."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.remote.backoff import Backoff

shares = st.floats(0, 1, exclude_max=True)


def test_it_doubles_up_to_its_limit() -> None:
    """The interval that a delay is drawn from."""
    backoff = Backoff(0.5, 3.0)
    assert [backoff.delay_seconds(n, 1.0) for n in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.integers(1, 10**6), shares, shares)
def test_the_whole_interval_is_drawn_from(failures: int, low: float, high: float) -> None:
    """Full jitter: callers that failed together do not come back together."""
    backoff = Backoff(0.25, 10.0)
    low, high = sorted((low, high))
    assert backoff.delay_seconds(failures, 0.0) == 0.0
    assert (
        0.0 <= backoff.delay_seconds(failures, low) <= backoff.delay_seconds(failures, high) < 10.0
    )
    assert backoff.delay_seconds(failures, high) <= backoff.delay_seconds(failures + 1, high)

"""From samples to a report: what is counted, from when, and for whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.bench.load_statistics import (
    UNFINISHED,
    Sample,
    compute_spread,
    make_report,
    percentile,
)


def answered(due: float, sent: float, *times: float, count: int = 1) -> Sample:
    """A request whose chunks came at `times` and which ended with the last of them."""
    sample = Sample(due, sent, prompt_tokens=10)
    for time in times:
        sample.add_chunk(time, count)
    sample.finish(times[-1])
    return sample


def test_an_open_loop_is_judged_from_the_time_a_request_was_due() -> None:
    """A client that could not send in time must not make the server look fast."""
    summary = make_report([answered(1.0, 1.5, 2.0, 2.5)], began=0.0, window=None, is_open=True)
    assert summary.latencies_ms["ttft"].p50 == pytest.approx(1000)
    assert summary.latencies_ms["ttft_since_sent"].p50 == pytest.approx(500)
    assert summary.latencies_ms["end_to_end"].p50 == pytest.approx(1500)
    assert summary.latencies_ms["end_to_end_since_sent"].p50 == pytest.approx(1000)


def test_a_closed_loop_has_no_second_clock() -> None:
    """There, a request is due when it is sent."""
    summary = make_report([answered(1.0, 1.0, 2.0)], began=0.0, window=None, is_open=False)
    assert not any(name.endswith("since_sent") for name in summary.latencies_ms)


def test_inter_token_time_is_between_chunks() -> None:
    """Tokens that come in one chunk were waited for together."""
    summary = make_report([answered(0.0, 0.0, 1.0, 1.2, 1.6, count=3)], 0.0, None, is_open=False)
    gaps = summary.latencies_ms["inter_token"]
    assert gaps.count == 2
    assert gaps.max == pytest.approx(400)
    assert summary.tokens_per_chunk == 3


def test_failed_requests_are_counted_by_code_and_not_timed() -> None:
    """A refusal in 1 ms would be the best latency of all."""
    refused, cut = Sample(0.0), Sample(0.0)
    refused.finish(0.001, "queue_full")
    cut.add_chunk(0.1, 5)
    cut.finish(9.0, UNFINISHED)
    summary = make_report([refused, cut, answered(0.0, 0.0, 1.0)], 0.0, None, is_open=False)
    assert summary.errors == {"queue_full": 1, UNFINISHED: 1}
    assert (summary.requests, summary.completed) == (3, 1)
    assert summary.latencies_ms["end_to_end"].count == 1


def test_the_rate_counts_only_what_came_within_the_window() -> None:
    """While the last requests drain, fewer run: that tail is not the load's rate."""
    samples = [answered(0.0, 0.0, 1.0, 2.0, 3.0), answered(0.0, 0.0, 9.0)]
    summary = make_report(samples, began=0.0, window=2.0, is_open=False)
    assert summary.tokens_per_second == pytest.approx(1.0)
    assert summary.output_tokens == 4


def test_without_a_window_the_last_request_ends_the_measurement() -> None:
    """A load of so many requests is over when they are."""
    summary = make_report(
        [answered(10.0, 10.0, 12.0, 14.0)], began=10.0, window=None, is_open=False
    )
    assert summary.seconds == pytest.approx(4.0)
    assert summary.tokens_per_second == pytest.approx(0.5)


def test_later_attempts_are_counted() -> None:
    """A load during a failover shows how many requests moved."""
    moved = answered(0.0, 0.0, 1.0)
    moved.attempts = 3
    assert make_report([moved], 0.0, None, is_open=False).later_attempts == 2


def test_stages_are_those_the_gateway_reported() -> None:
    """They tell which part of the walk a latency comes from."""
    samples = [answered(0.0, 0.0, 1.0), answered(0.0, 0.0, 1.0)]
    samples[0].timing, samples[1].timing = {"queue": 4.0}, {"queue": 8.0, "prefill": 1.0}
    stages = make_report(samples, 0.0, None, is_open=False).stages_ms
    assert stages["queue"].mean == pytest.approx(6.0)
    assert stages["prefill"].count == 1


def test_no_request_at_all_still_gives_a_report() -> None:
    """Stopped at once is no crash."""
    summary = make_report([], began=5.0, window=None, is_open=True)
    assert (summary.requests, summary.latencies_ms, summary.tokens_per_chunk) == (0, {}, 0.0)
    assert compute_spread([]) is None


@given(st.integers(0, 500), st.integers(1, 60))
def test_spread_tokens_add_up(tokens: int, chunks: int) -> None:
    """SSE tells only the sum: dealing it out must neither lose nor invent tokens."""
    sample = Sample(0.0)
    for i in range(chunks):
        sample.add_chunk(float(i), 1)
    sample.spread_tokens(tokens)
    assert sum(sample.counts) == sample.tokens == tokens
    assert max(sample.counts) - min(sample.counts) <= 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_within_its_values(values: list[float], q: float) -> None:
    """Interpolation may not leave the range."""
    ordered = sorted(values)
    assert ordered[0] <= percentile(ordered, q) <= ordered[-1]


def test_percentiles_interpolate() -> None:
    """As numpy's default does, so that figures can be compared with others'."""
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)

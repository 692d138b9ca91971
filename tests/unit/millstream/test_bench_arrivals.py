"""When a load sends what: replayed times, Poisson gaps, cuts and limits."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.bench.arrivals import (
    Arrival,
    LengthLimits,
    TraceError,
    limit_arrivals,
    mean_rate,
    poisson_arrivals,
    read_trace,
    repeat_sizes,
    replay_at_rate,
    replay_at_speed,
)

HEADER = "t_s,prompt_tokens,output_tokens\n"
SIZES = Arrival(0.0, 8, 4)


def every_second(count: int) -> list[Arrival]:
    return [Arrival(float(i), 10 + i, 5) for i in range(count)]


def test_a_trace_starts_at_its_first_arrival() -> None:
    """A cut-out of a longer trace must not begin with an hour of nothing."""
    trace = read_trace([HEADER, "100.5,7,3\n", "101.5,9,1\n"])
    assert trace == [Arrival(0.0, 7, 3), Arrival(1.0, 9, 1)]


def test_a_trace_is_read_by_the_names_of_its_columns() -> None:
    """Published traces put tenant, model and session anywhere."""
    trace = read_trace(["tenant_id,output_tokens,prompt_tokens,t_s\n", "c1,3,7,0.25\n"])
    assert trace == [Arrival(0.0, 7, 3)]


def test_rows_out_of_order_are_put_in_order() -> None:
    """An open loop waits for each arrival in turn: an early row behind a late one is late."""
    trace = read_trace([HEADER, "2,1,1\n", "0,2,2\n"])
    assert [arrival.prompt_tokens for arrival in trace] == [2, 1]


@pytest.mark.parametrize(
    "row", ["x,1,1", "0,1.5,1", "0,0,1", "0,1,-2", "nan,1,1", "inf,1,1", "0,1"]
)
def test_a_bad_row_is_refused_with_its_line(row: str) -> None:
    """A trace of thousands of lines is searched by nobody."""
    with pytest.raises(TraceError, match="line 3"):
        read_trace([HEADER, "0,1,1\n", row + "\n"])


@pytest.mark.parametrize("lines", [[], ["a,b\n", "1,2\n"], [HEADER]])
def test_what_is_no_trace_is_refused(lines: list[str]) -> None:
    """Another kind of file, or an empty one, is no load."""
    with pytest.raises(TraceError):
        read_trace(lines)


@given(st.floats(0.01, 1000))
def test_a_scaled_trace_has_the_asked_rate(rate: float) -> None:
    """`--rate` is what the server will see on average, whatever the trace's own rate."""
    scaled = list(replay_at_rate(every_second(11), rate))
    assert mean_rate(scaled) == pytest.approx(rate)


def test_speed_keeps_the_shape_of_bursts() -> None:
    """Replaying faster shrinks every gap alike: a burst stays a burst."""
    trace = [Arrival(0.0, 1, 1), Arrival(0.1, 1, 1), Arrival(10.0, 1, 1)]
    assert [arrival.at for arrival in replay_at_speed(trace, 10)] == pytest.approx([0.0, 0.01, 1.0])


def test_a_burst_without_a_span_cannot_be_scaled_and_stays() -> None:
    """All at once is all at once at any rate."""
    together = [SIZES, SIZES]
    assert list(replay_at_rate(together, 5.0)) == together


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() -> None:
    """Evenly spaced requests would hide every queue."""
    times = [
        arrival.at for arrival in itertools.islice(poisson_arrivals(50.0, SIZES, Random(1)), 20_000)
    ]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert variance**0.5 == pytest.approx(mean, rel=0.03)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    """Two runs can only be compared under the same load."""
    one, two = (
        list(limit_arrivals(poisson_arrivals(9.0, SIZES, Random(7)), 5.0, None)) for _ in range(2)
    )
    assert one == two


def test_a_load_ends_at_its_duration_or_its_count_whichever_is_first() -> None:
    """Both limits hold when both are given."""
    assert len(list(limit_arrivals(every_second(100), 10.0, None))) == 10
    assert len(list(limit_arrivals(every_second(100), 10.0, 3))) == 3
    assert len(list(limit_arrivals(every_second(5), None, None))) == 5


def test_a_closed_loop_takes_sizes_over_and_over_without_times() -> None:
    """It sends when something came back, for as long as it is asked to."""
    taken = list(itertools.islice(repeat_sizes(every_second(2)), 5))
    assert [arrival.prompt_tokens for arrival in taken] == [10, 11, 10, 11, 10]
    assert {arrival.at for arrival in taken} == {0.0}


def test_a_long_request_is_cut_to_the_limits() -> None:
    """Traces of large models are replayed on small ones."""
    cut = LengthLimits(prompt_tokens=100, output_tokens=20).shorten(Arrival(1.5, 5000, 700))
    assert cut == Arrival(1.5, 100, 20)


@given(
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.integers(2, 5000),
    st.none() | st.integers(1, 5000),
)
def test_a_cut_request_always_fits_the_context(
    prompt: int, output: int, context: int, longest: int | None
) -> None:
    """The gateway refuses what cannot fit: a refused request measures nothing."""
    cut = LengthLimits(longest, longest, context).shorten(Arrival(0.0, prompt, output))
    assert cut.prompt_tokens >= 1
    assert cut.output_tokens >= 1
    assert cut.prompt_tokens + cut.output_tokens <= context

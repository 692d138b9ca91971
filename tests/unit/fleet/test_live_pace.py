"""The pace of live workers: what a minute of heartbeats says, and what curves become by it."""

import pytest

from fleet.signals.live_pace import (
    LivePace,
    ObservedPace,
    WorkerPool,
    correction_factor,
    learn_curve,
)
from streams.messages import Heartbeat
from streams.records.fleet.curves import Curve, CurveSource
from streams.records.fleet.step_times import RequestShape, StepTimes

POOL = WorkerPool("m", "1", "l4")
SHAPE = RequestShape(100, 50)
TIMES = StepTimes(step_seconds=0.02, sequence_seconds=0.001)
CURVE = Curve(*POOL, CurveSource.BENCH, 5.0, TIMES, max_sequences=32, kv_tokens=10_000)


def beat(running: int, generated: int, worker: str = "w1") -> Heartbeat:
    return Heartbeat(worker, "m", "1", 0, 0, running, 0, 32, 10_000, generated, 0.0, type="l4")


def observe(pace: LivePace, running: int, per_second: int, seconds: int, since: float) -> None:
    for second in range(seconds + 1):
        pace.add(beat(running, 1000 + second * per_second), since + second)


def test_a_minute_tells_how_long_each_token_took_and_how_many_ran() -> None:
    """8 requests at once that get 200 tokens a second together: each waits 40 ms for its next."""
    pace = LivePace(100.0)
    observe(pace, 8, 200, 60, 100.0)
    assert pace.close_minute(159.0) is None
    observed = pace.close_minute(160.0)
    assert observed
    assert observed.batch == pytest.approx(8)
    assert observed.seconds_per_token == pytest.approx(0.04)
    assert (observed.max_sequences, observed.kv_tokens) == (32, 10_000)
    assert pace.close_minute(220.0) is None  # nothing was heard in that one


def test_what_was_not_heard_counts_for_nothing() -> None:
    """A worker that was silent, or has started anew, tells nothing of the time between."""
    pace = LivePace(0.0)
    observe(pace, 8, 200, 30, 0.0)
    pace.add(beat(8, 10**6), 50.0)  # after twenty silent seconds
    pace.add(beat(8, 7), 51.0)  # another process of the same name
    for second in range(1, 11):
        pace.add(beat(8, 7 + 200 * second), 51.0 + second)
    observed = pace.close_minute(61.0)
    assert observed
    assert observed.seconds_per_token == pytest.approx(0.04)


def test_a_pool_that_rests_tells_nothing() -> None:
    """A minute with a single request in it is no measurement."""
    pace = LivePace(0.0)
    observe(pace, 0, 0, 55, 0.0)
    observe(pace, 1, 50, 10, 56.0)
    assert pace.close_minute(66.0) is None


def test_a_measured_curve_is_corrected_within_bounds() -> None:
    """A slow neighbour is; a worker that is ten times as slow was never what was measured."""
    expected = TIMES.request_seconds(8, SHAPE) / SHAPE.output_tokens
    for told, factor in ((1.0, 1.0), (1.3, 1.3), (10.0, 2.0), (0.1, 0.5)):
        observed = ObservedPace(8, told * expected, 32, 10_000)
        assert correction_factor(CURVE, SHAPE, observed) == pytest.approx(factor)


def test_a_curve_is_learnt_from_the_first_minute_and_grows_with_the_batch() -> None:
    """A planner must not buy by what nobody has seen."""
    first = learn_curve(POOL, [ObservedPace(4, 0.024, 32, 10_000)], 9.0)
    assert first.source is CurveSource.LIVE
    assert first.times.decode_seconds(4, SHAPE) == pytest.approx(0.024)
    assert first.max_sequences == 8
    paces = [ObservedPace(batch, 0.02 + 0.001 * batch, 32, 10_000) for batch in (4, 8, 16)]
    learnt = learn_curve(POOL, paces, 9.0)
    assert learnt.times.step_seconds == pytest.approx(0.02)
    assert learnt.times.sequence_seconds == pytest.approx(0.001)
    assert learnt.max_sequences == 32
    falling = [ObservedPace(4, 0.03, 32, 10_000), ObservedPace(16, 0.02, 32, 10_000)]
    assert learn_curve(POOL, falling, 9.0).times.sequence_seconds == 0

"""Curves: read back as written, and what follows from them for a planner."""

import json
from dataclasses import replace

import pytest

from streams.records.fleet.curves import Curve, CurvePoint, CurveSource
from streams.records.fleet.step_times import CapacityGoals, RequestShape, StepTimes

TIMES = StepTimes(0.01, 0.02, 0.0005, 1e-7, 0.004, 0.0001)
CURVE = Curve("m", "1", "small", CurveSource.BENCH, 5.0, TIMES, max_sequences=32, kv_tokens=10_000)
SHAPE = RequestShape(500, 200)
NO_GOALS = CapacityGoals()


def test_a_curve_reads_back_as_it_was_written() -> None:
    """The planner and the admin service know of each other's curves by these bytes alone."""
    point = CurvePoint(4, 500, 200, 0.1, 0.02, 1.0)
    curve = replace(CURVE, load_seconds=3.0, kv_bytes_per_token=7, points=[point])
    assert Curve.unpack(curve.pack(), 9) == replace(curve, revision=9)
    as_map = json.loads(json.dumps(curve, default=vars))
    assert Curve.from_map(as_map) == curve


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"times": {"step_seconds": -1.0}}, "step_seconds"),
        ({"times": {"step_seconds": float("inf")}}, "step_seconds"),
        ({"times": {}}, "no time"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"source": "guess"}, "guess"),
    ],
)
def test_a_curve_that_no_machine_has_is_refused(wrong: dict[str, object], told: str) -> None:
    """A planner that divides by such a number would buy machines without end."""
    as_map = json.loads(json.dumps(CURVE, default=vars))
    with pytest.raises(ValueError, match=told):
        Curve.from_map({**as_map, **wrong})


def test_a_batch_is_bounded_by_sequences_and_by_memory() -> None:
    """Each request holds the KV of its prompt and its output."""
    assert CURVE.max_batch(RequestShape(10, 10)) == 32
    assert CURVE.max_batch(SHAPE) == 10_000 // 700
    assert CURVE.max_batch(RequestShape(10_000, 1)) == 0
    sized = replace(CURVE, weight_bytes=1000, kv_bytes_per_token=10)
    assert sized.max_batch(SHAPE, memory=1000 + 10 * 700 * 3) == 3
    assert sized.max_batch(SHAPE, memory=500) == 0


def test_capacity_has_the_largest_batch_that_keeps_the_goals() -> None:
    """The next larger one breaks a goal; without goals memory decides."""
    free = CURVE.capacity(SHAPE, NO_GOALS)
    assert free
    assert free.batch == CURVE.max_batch(SHAPE)
    for goals in (CapacityGoals(first_token_seconds=0.1), CapacityGoals(token_seconds=0.03)):
        found = CURVE.capacity(SHAPE, goals)
        assert found
        assert 0 < found.batch < free.batch
        above = CURVE.capacity_at(found.batch + 1, SHAPE)
        assert above.first_token_seconds > (
            goals.first_token_seconds or 9
        ) or above.token_seconds > (goals.token_seconds or 9)
        assert found.requests_per_second < free.requests_per_second
    assert CURVE.capacity(SHAPE, CapacityGoals(first_token_seconds=0.01)) is None
    assert CURVE.capacity(RequestShape(10_000, 1), NO_GOALS) is None


def test_capacity_counts_each_prompt_and_each_token_once() -> None:
    """A second of a full batch is full of steps and prompts."""
    times = replace(TIMES, latency_seconds=0.0)
    found = replace(CURVE, times=times).capacity_at(10, SHAPE)
    steps = found.output_tokens_per_second / 10
    prompts = found.requests_per_second * times.prompt_seconds(SHAPE)
    busy = steps * times.decode_seconds(10, SHAPE) + prompts
    assert busy == pytest.approx(1.0, rel=0.02)
    assert found.prompt_tokens_per_second == 500 * found.requests_per_second


def test_scaled_times_take_as_much_longer() -> None:
    """So a curve is corrected by what workers do at their work."""
    twice = TIMES.scaled(2)
    assert twice.request_seconds(8, SHAPE) == pytest.approx(2 * TIMES.request_seconds(8, SHAPE))

"""The bench of curves: what it sends, what it counts, and the times that fit its points."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from millstream.bench.curve_bench import (
    CurveCell,
    CurveNotMeasured,
    choose_workers,
    make_cells,
    make_point,
)
from millstream.bench.curve_fit import CurveNotFitted, fit_times, relative_error
from millstream.bench.load_statistics import Sample
from millstream.bench.settings import BenchSettings
from streams.records.fleet.curves import CurvePoint
from streams.records.fleet.step_times import RequestShape, StepTimes

GRID = [
    (batch, shape)
    for batch in (1, 4, 16, 32)
    for shape in (RequestShape(64, 64), RequestShape(512, 64), RequestShape(512, 16))
]
WORKER = {"max_sequences": 32, "kv_tokens": 20_000}


def measure(times: StepTimes, noise: Callable[[int], float] = lambda _: 1.0) -> list[CurvePoint]:
    return [
        CurvePoint(
            batch,
            shape.prompt_tokens,
            shape.output_tokens,
            times.first_token_seconds(batch, shape) * noise(2 * number),
            times.token_seconds(batch, shape) * noise(2 * number + 1),
            1.0,
        )
        for number, (batch, shape) in enumerate(GRID)
    ]


_TIMES = st.builds(
    StepTimes,
    st.floats(0.001, 0.05),
    st.floats(0.002, 0.05),
    st.floats(0.0, 0.002),
    st.floats(0.0, 1e-6),
    st.floats(0.0, 0.02),
    st.floats(0.0, 0.001),
)


@given(_TIMES)
def test_the_times_behind_exact_points_are_found(times: StepTimes) -> None:
    """Whatever the engine; only what it does can be told, not by which of its times."""
    points = measure(times)
    found = fit_times(points)
    assert max(relative_error(found, point) for point in points) < 0.02
    between = RequestShape(200, 40)
    assert found.token_seconds(8, between) == pytest.approx(
        times.token_seconds(8, between), rel=0.1
    )


def test_noise_moves_the_times_by_no_more_than_itself() -> None:
    """A machine beside others measures some 5 % this way and that."""
    times = StepTimes(0.01, 0.02, 0.0005, 2e-6, 0.005, 0.0002)
    points = measure(times, lambda number: 1.05 if number % 3 else 0.95)
    found = fit_times(points)
    for batch, shape in GRID:
        true = times.request_seconds(batch, shape)
        assert found.request_seconds(batch, shape) == pytest.approx(true, rel=0.1)


def test_points_without_a_pace_are_no_curve() -> None:
    """A planner would divide by it."""
    points = [CurvePoint(1, 64, 64, 1.0, 1e300, 1.0)]
    with pytest.raises(CurveNotFitted, match="1 points"):
        fit_times(points)


def test_cells_go_from_one_request_to_what_fits() -> None:
    """More would wait on the worker, and be measured as if it ran."""
    cells = make_cells(BenchSettings(curve=True), WORKER, None)
    assert {cell.batch for cell in cells} == {1, 4, 16, 32}
    assert {(c.prompt_tokens, c.output_tokens) for c in cells} == {(64, 64), (512, 64), (512, 16)}
    for cell in make_cells(BenchSettings(curve=True), {**WORKER, "kv_tokens": 2000}, None):
        outputs = [each.output_tokens for each in cell.arrivals(1, 0)]
        assert cell.batch * (cell.prompt_tokens + max(outputs)) <= 2000
        assert min(outputs) < cell.output_tokens < max(outputs)
    assert {c.prompt_tokens for c in make_cells(BenchSettings(curve=True), WORKER, 300)} == {64}
    assert make_cells(BenchSettings(curve=True), {**WORKER, "kv_tokens": 10}, None) == []


def sample(sent: float, code: str = "") -> Sample:
    """A request with its first token after a second, and ten more, each after 0.1 s."""
    times = array("d", [sent + 1 + 0.1 * number for number in range(11)])
    made = Sample(sent, sent, prompt_tokens=64, times=times, counts=array("I", [1] * 11), tokens=11)
    made.finish(sent + 2, code)
    return made


def test_a_point_leaves_out_how_a_load_begins_and_ends() -> None:
    """The batch is not full then."""
    odd = sample(0.0)
    odd.times[0] = 0.0
    cell = CurveCell(2, 64, 11)
    point = make_point(cell, [odd, odd, *map(sample, range(6)), odd, odd], 1)
    assert point.first_token_seconds == pytest.approx(1)
    assert point.token_seconds == pytest.approx(0.1)
    assert point.requests_per_second == pytest.approx(1)
    assert (point.prompt_tokens, point.output_tokens) == (64, 11)
    with pytest.raises(CurveNotMeasured, match="0 of 6 requests .*overloaded"):
        make_point(cell, [odd, odd, *(sample(0.0, "overloaded") for _ in range(6)), odd, odd], 1)


def worker(type_name: str, version: str = "1", draining: bool = False) -> dict[str, Any]:
    return {"type": type_name, "version": version, "draining": draining}


def test_workers_of_one_type_are_measured() -> None:
    """A load on two types at once would be a curve of neither."""
    l4 = worker("l4")
    others = [worker("l5", "2"), worker("l5", draining=True)]
    assert choose_workers([l4, *others], "m@1", None) == [l4]
    assert choose_workers([l4], "m@1", "l4") == [l4]
    for found, type_name, told in (
        ([], None, "no worker serves m@1"),
        ([worker("")], None, "name no machine type"),
        ([l4, worker("l5")], "l4", "l4, l5 serve m@1"),
        ([l4], "l5", "only workers of l5"),
    ):
        with pytest.raises(CurveNotMeasured, match=told):
            choose_workers(found, "m@1", type_name)


@pytest.mark.parametrize("wrong", [{"curve": True, "rate": 3.0}, {"type": "l4"}])
def test_options_of_another_bench_are_refused(wrong: dict[str, Any]) -> None:
    """A rate that is not kept would be believed."""
    with pytest.raises(ValidationError, match="curve"):
        BenchSettings.model_validate(wrong)

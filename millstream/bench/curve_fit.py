"""Fits the times of an engine's steps to what was measured, by least squares of ratios. Pure."""

from collections.abc import Sequence
from dataclasses import fields

from streams.errors import MillstreamError
from streams.records.fleet.curves import CurvePoint
from streams.records.fleet.step_times import RequestShape, StepTimes

_NAMES = [each.name for each in fields(StepTimes)]
_MAX_ROUNDS = 20_000
_PRECISION = 1e-9
Row = list[float]


class CurveNotFitted(MillstreamError):
    """The measured points are no times that an engine can have."""


def fit_times(points: Sequence[CurvePoint]) -> StepTimes:
    """Return the step times whose first-token and token seconds are nearest to the points'.

    None is negative. Each ratio of predicted to measured seconds counts the same, so that short
    times are met as well as long ones. Raises `CurveNotFitted`.
    """
    rows = [row for point in points for row in _rows(point)]
    found = StepTimes(**dict(zip(_NAMES, _solve(rows), strict=True)))
    if found.step_seconds + found.sequence_seconds <= 0:
        raise CurveNotFitted(
            f"in {len(points)} points a step takes no time: measure with longer outputs or more "
            "requests"
        )
    return found


def relative_error(times: StepTimes, point: CurvePoint) -> float:
    """Return by how much the predicted pace of a point is off: 0.1 is a tenth."""
    shape = RequestShape(point.prompt_tokens, point.output_tokens)
    return abs(times.token_seconds(point.batch, shape) / point.token_seconds - 1)


def _rows(point: CurvePoint) -> list[Row]:
    """Shares of each step time in the two durations of each point."""
    shape = RequestShape(point.prompt_tokens, point.output_tokens)
    units = [StepTimes(**{name: 1.0}) for name in _NAMES]
    return [
        [
            unit.first_token_seconds(point.batch, shape) / point.first_token_seconds
            for unit in units
        ],
        [unit.token_seconds(point.batch, shape) / point.token_seconds for unit in units],
    ]


def _solve(rows: Sequence[Row]) -> Row:
    """Return the x >= 0 for which all rows times x are nearest to 1, by coordinate descent."""
    count = range(len(_NAMES))
    gram = [[sum(row[i] * row[j] for row in rows) for j in count] for i in count]
    target = [sum(row[i] for row in rows) for i in count]
    x = [0.0 for _ in count]
    for _ in range(_MAX_ROUNDS):
        moved = 0.0
        for i in count:
            if not gram[i][i]:
                continue
            slope = target[i] - sum(gram[i][j] * x[j] for j in count)
            better = max(0.0, x[i] + slope / gram[i][i])
            moved = max(moved, abs(better - x[i]) * gram[i][i] ** 0.5)
            x[i] = better
        if moved < _PRECISION:
            break
    return x

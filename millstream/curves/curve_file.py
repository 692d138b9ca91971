"""Reads a file of curves: JSON Lines, as `millstream curves list --json` prints them. Pure."""

import json
from collections.abc import Iterable
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from streams.errors import MillstreamError
from streams.records.fleet.curves import Curve, CurveSource

_CURVE = TypeAdapter(Curve)


class CurveUnreadable(MillstreamError):
    """A line of a file is no curve; the message has the file, the line and what is wrong."""


def parse_curves(lines: Iterable[str], file: str) -> list[Curve]:
    """Return the curves of a file named `file`, of which empty lines are passed over.

    Live ones, and those without a source, are from a file now. Raises `CurveUnreadable`.
    """
    curves = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                curves.append(_parse_curve(line))
            except CurveUnreadable as error:
                raise CurveUnreadable(f"{file}, line {number}: {error}") from None
    return curves


def _parse_curve(line: str) -> Curve:
    try:
        told = json.loads(line)
    except ValueError as error:
        raise CurveUnreadable(f"it is no JSON: {error}") from None
    if not isinstance(told, dict):
        raise CurveUnreadable("it is no JSON object")
    try:
        curve = _CURVE.validate_python({"measured_at": 0.0, "source": CurveSource.FILE, **told})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CurveUnreadable(f"{place}: {first['msg']}".removeprefix(": ")) from None
    return replace(curve, source=CurveSource.FILE) if curve.source == CurveSource.LIVE else curve

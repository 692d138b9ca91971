"""A pydantic type for durations such as `20s`, `15m`, `2h`, `7d`, or a number of seconds."""

import re
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)\Z")


def parse_duration(value: object) -> object:
    """Return a duration written as text, such as `20s` or `2h`, in seconds.

    A number alone is in seconds. A value that is not text is returned unchanged, for pydantic to
    check. Raises `ValueError` for text that is not a duration.
    """
    if not isinstance(value, str):
        return value
    found = _PATTERN.match(value)
    if not found:
        raise ValueError(f"{value!r} is no duration: write 20s, 15m, 2h or 7d")
    return float(found[1]) * _UNITS[found[2]]


Duration = Annotated[float, BeforeValidator(parse_duration)]

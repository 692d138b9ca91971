"""A pydantic type for durations such as `20s`, `15m`, `2h`, `7d`, or a number of seconds."""

import re
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)\Z")


def parse_duration(value: object) -> object:
    """Return the seconds, as a float, of a duration written as text: `20s`, `15m`, `2h` or `7d`.

    Text with a number and no unit, such as `20`, is in seconds. A value that is not a string is
    returned unchanged, because pydantic checks it afterwards. Raises `ValueError` for any other
    text.
    """
    if not isinstance(value, str):
        return value
    found = _PATTERN.match(value)
    if not found:
        raise ValueError(f"{value!r} is no duration: write 20s, 15m, 2h or 7d")
    return float(found[1]) * _UNITS[found[2]]


Duration = Annotated[float, BeforeValidator(parse_duration)]

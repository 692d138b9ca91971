"""Durations as people write them."""

import pytest
from pydantic import TypeAdapter, ValidationError

from millstream.durations import Duration

ADAPTER = TypeAdapter(Duration)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("20", 20), ("20s", 20), ("1.5m", 90), ("2h", 7200), ("7d", 604_800), (3, 3)],
)
def test_a_duration_is_a_number_with_a_unit(written: object, seconds: float) -> None:
    """Seconds, if there is none."""
    assert ADAPTER.validate_python(written) == seconds


@pytest.mark.parametrize("written", ["", "s", "-1s", "2 h", "1h30m", "soon"])
def test_what_is_none_is_refused_with_an_example(written: str) -> None:
    """The message is all that its author sees."""
    with pytest.raises(ValidationError, match="write 20s, 15m, 2h or 7d"):
        ADAPTER.validate_python(written)

"""What a token log held is only worth continuing if nothing of it is missing."""

import pytest

from streams.token_log import Contents

CLAIM = {"type": "started", "attempt": 1}


def chunk(index: int, count: int) -> dict[str, object]:
    return {"type": "chunk", "index": index, "count": count, "tokens": [0] * count}


@pytest.mark.parametrize(
    ("records", "whole"),
    [
        ([CLAIM], True),
        ([CLAIM, chunk(0, 2), CLAIM, chunk(2, 1)], True),
        ([chunk(2, 1), chunk(3, 1)], False),
        ([CLAIM, chunk(0, 2), chunk(3, 1)], False),
    ],
)
def test_a_log_without_its_beginning_is_not_whole(
    records: list[dict[str, object]], whole: bool
) -> None:
    """A full stream drops the oldest records; going on behind the rest would repeat tokens."""
    assert Contents(records).whole == whole

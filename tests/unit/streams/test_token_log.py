"""What a token log held is only worth continuing if nothing of it is missing."""

import pytest

from streams.records.log_contents import LogContents

CLAIM = {"type": "started", "attempt": 1}


def chunk(index: int, *tokens: int) -> dict[str, object]:
    text = "".join(map(str, tokens))
    place = {"type": "chunk", "index": index, "count": len(tokens)}
    return place | {"tokens": list(tokens), "text": text}


@pytest.mark.parametrize(
    ("records", "generated", "is_headless"),
    [
        ([CLAIM], 0, False),
        ([CLAIM, chunk(0, 5, 6), CLAIM, chunk(2, 7)], 3, False),
        ([chunk(2, 7), chunk(3, 8), CLAIM], 4, True),
        ([CLAIM, chunk(0, 5, 6), chunk(3, 8)], 4, True),
    ],
)
def test_a_log_without_its_beginning_is_headless(
    records: list[dict[str, object]], generated: int, is_headless: bool
) -> None:
    """A full stream drops the oldest records; going on behind the rest would repeat tokens."""
    contents = LogContents(records)
    assert contents.generated_tokens == generated
    assert contents.is_truncated == is_headless


@pytest.mark.parametrize(
    ("records", "first"),
    [
        ([CLAIM], 0),
        ([CLAIM, chunk(0, 5) | {"at": 7}, chunk(1, 6)], 7),
        ([CLAIM, CLAIM | {"first_output_at": 7}, chunk(2, 7)], 7),
        ([chunk(2, 7), chunk(3, 8)], 0),
    ],
)
def test_the_time_of_the_first_output_is_that_of_the_first_attempt_that_gave_one(
    records: list[dict[str, object]], first: int
) -> None:
    """A goal is met or missed once; a second attempt does not move what the client has seen."""
    assert LogContents(records).first_output_at == first


def test_attempts_are_counted_though_early_claims_are_gone() -> None:
    """The next one must be another than any before it."""
    assert LogContents([chunk(2, 7), CLAIM | {"attempt": 3}, chunk(3, 8)]).attempts == 3
    assert LogContents([]).attempts == 0

"""What a token log held is gone on from, from its last beginning."""

import pytest

from streams.token_log import Contents

CLAIM = {"type": "started", "attempt": 1}


def chunk(index: int, *tokens: int) -> dict[str, object]:
    text = "".join(map(str, tokens))
    place = {"type": "chunk", "index": index, "count": len(tokens)}
    return place | {"tokens": list(tokens), "text": text}


@pytest.mark.parametrize(
    ("records", "tokens", "is_headless"),
    [
        ([CLAIM], [], False),
        ([CLAIM, chunk(0, 5, 6), CLAIM, chunk(2, 7)], [5, 6, 7], False),
        ([chunk(2, 7), chunk(3, 8)], [], True),
        ([chunk(2, 7), CLAIM, chunk(0, 5), chunk(1, 6)], [5, 6], False),
        ([chunk(0, 5), chunk(1, 6), CLAIM, chunk(0, 5, 6, 7)], [5, 6, 7], False),
    ],
)
def test_an_attempt_goes_on_from_the_last_beginning(
    records: list[dict[str, object]], tokens: list[int], is_headless: bool
) -> None:
    """A full stream drops the oldest records; going on behind the rest would repeat tokens."""
    contents = Contents(records)
    assert contents.tokens == tokens
    assert contents.text == "".join(map(str, tokens))
    assert contents.is_headless == is_headless

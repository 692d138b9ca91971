"""A batch is cut so that each piece fits, and little of it is padding."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.unary.micro_batches import split_into_micro_batches

INF = float("inf")


def cut(lengths: list[int], max_tokens: int, max_padding: float = INF) -> list[list[int]]:
    return split_into_micro_batches(lengths, lambda length: length, max_tokens, max_padding)


def test_rows_times_the_longest_stay_within_the_limit() -> None:
    """One that is longer runs alone."""
    assert cut([4, 1, 9, 3, 3], max_tokens=8) == [[1, 3], [3, 4], [9]]


def test_padding_that_costs_more_than_a_micro_batch_is_avoided() -> None:
    """Three short ones beside a long one would be mostly padding."""
    assert cut([5, 5, 50, 5], max_tokens=1000, max_padding=100) == [[5, 5, 5], [50]]
    assert cut([5, 5, 50, 5], max_tokens=1000, max_padding=135) == [[5, 5, 5, 50]]


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 4096), st.floats(0, 500))
def test_every_item_is_in_one_micro_batch(
    lengths: list[int], max_tokens: int, max_padding: float
) -> None:
    """Shortest first, and no piece breaks a limit unless it is a single item."""
    batches = cut(lengths, max_tokens, max_padding)
    assert [length for batch in batches for length in batch] == sorted(lengths)
    for batch in batches:
        padded = len(batch) * batch[-1]
        assert len(batch) == 1 or padded <= max_tokens
        assert padded - sum(batch) <= max_padding

"""Chunks of prompts are computed together where they see alike, and every row just once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engines.paged.batch.block_pool import blocks_for
from gpu_worker.engines.paged.batch.sequence_state import (
    BlockTable,
    SequenceSlice,
    SequenceState,
    SlidingWindow,
)
from gpu_worker.engines.paged.batch.step_inputs import (
    PREFILL_ROWS,
    TILE_ROWS,
    PrefillGroup,
    StepInputs,
)

pieces = st.lists(st.tuples(st.integers(0, 700), st.integers(2, 200)), min_size=1, max_size=6)


def plan_of(chunks: list[tuple[int, int]], decoding: int, window: SlidingWindow) -> StepInputs:
    """A step of decoding runs, and of chunks by their start and count."""
    slices = [piece(90, 1, window) for _ in range(decoding)]
    slices += [piece(start, count, window) for start, count in chunks]
    return StepInputs(slices, torch.float32, torch.device("cpu"))


def piece(start: int, count: int, window: SlidingWindow) -> SequenceSlice:
    blocks = list(range(1, blocks_for(start + count) + 1))
    run = SequenceState(
        "r", [0] * (start + count), computed_tokens=start, block_tables={window: BlockTable(blocks)}
    )
    return SequenceSlice.next_tokens(run, count)


def written(group: PrefillGroup) -> list[int]:
    """The rows that a group's tiles write, in all."""
    tiles = (group.output_rows[: t.chunks, t.first : t.last] for t in group.tiles)
    return torch.cat([tile.flatten() for tile in tiles]).tolist()


@given(pieces, st.integers(0, 3), st.sampled_from([None, 100]))
def test_each_row_of_a_prompt_is_written_once_and_reads_itself(
    chunks: list[tuple[int, int]], decoding: int, window: SlidingWindow
) -> None:
    """A row left out would be zero in every layer, and one read for another a stranger's."""
    plan = plan_of(chunks, decoding, window)
    groups = plan.prefill_groups(window)
    rows = [row for group in groups for row in written(group) if row < len(plan.input_ids)]
    assert sorted(rows) == list(range(decoding, len(plan.input_ids)))
    for group in groups:
        own = group.output_rows < len(plan.input_ids)
        assert torch.equal(group.query_rows[own], group.output_rows[own])


@given(pieces, st.sampled_from([None, 100]))
def test_padding_costs_at_most_as_much_as_the_rows_and_a_tile_each(
    chunks: list[tuple[int, int]], window: SlidingWindow
) -> None:
    """A short prompt beside a long one would be computed as if it were long, too."""
    plan = plan_of(chunks, 0, window)
    padded = sum(group.output_rows.numel() for group in plan.prefill_groups(window))
    rows = sum(count for _, count in chunks)
    assert padded <= 2 * rows + len(chunks) * (PREFILL_ROWS + TILE_ROWS)


def test_prompts_of_like_length_are_one_group() -> None:
    """One by one, 32 short prompts took 32 calls in every layer."""
    plan = plan_of([(0, 64), (0, 60), (0, 40), (0, 64)], 1, None)
    assert [group.query_rows.shape for group in plan.prefill_groups(None)] == [(4, 64)]

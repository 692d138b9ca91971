"""Slices of several sequences end to end, with the KV they attend to, for FlashAttention."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gpu_worker.engines.device_transfer import to_device
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS, blocks_for
from gpu_worker.engines.paged.batch.sequence_state import (
    SequenceSlice,
    SlidingWindow,
    first_visible_position,
)


@dataclass(frozen=True)
class VarlenBatch:
    """A non-empty batch of slices as FlashAttention takes it, for the layers of one window.

    The rows of sequence `i` are `cu_seqlens_q[i]` up to `cu_seqlens_q[i + 1]`, its newest tokens.
    Tensors are made when first asked for.
    """

    slices: list[SequenceSlice]
    first_row: int  # the batch's first row in the step
    window: SlidingWindow
    device: torch.device

    @property
    def step_rows(self) -> slice:
        """The rows of the step that belong to the batch."""
        return slice(
            self.first_row, self.first_row + sum(seq_slice.count for seq_slice in self.slices)
        )

    @property
    def max_seqlen_q(self) -> int:
        """The largest number of rows that a sequence has in the batch."""
        return max(seq_slice.count for seq_slice in self.slices)

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """The first row of each sequence in the batch, then the number of rows: int32 `[n + 1]`."""
        return self._cumulative([seq_slice.count for seq_slice in self.slices])

    @cached_property
    def seq_lens(self) -> Tensor:
        """The tokens of each sequence so far, those of this step included: int32 `[n]`."""
        return to_device([seq_slice.end for seq_slice in self.slices], torch.int32, self.device)

    @property
    def max_seq_len(self) -> int:
        """The largest of `seq_lens`."""
        return max(seq_slice.end for seq_slice in self.slices)

    @cached_property
    def block_table(self) -> Tensor:
        """Each sequence's blocks in order of position, then null blocks: int32 `[n, b]`."""
        width = blocks_for(self.max_seq_len)
        tables = [s.state.block_tables[self.window].blocks[:width] for s in self.slices]
        rows = [blocks + [0] * (width - len(blocks)) for blocks in tables]
        return to_device(rows, torch.int32, self.device)

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """The start of each sequence in `visible_slots`, then the end: int32 `[n + 1]`."""
        return self._cumulative([len(self._visible_range(seq_slice)) for seq_slice in self.slices])

    @property
    def max_seqlen_k(self) -> int:
        """The largest number of tokens that a sequence attends to."""
        return max(len(self._visible_range(seq_slice)) for seq_slice in self.slices)

    @cached_property
    def visible_slots(self) -> Tensor:
        """The slots of the tokens that the sequences attend to, one sequence after another; int64.

        Slots number the tokens of all KV blocks of the window, laid end to end.
        """
        return torch.cat([self._slots_of(seq_slice) for seq_slice in self.slices])

    def _visible_range(self, seq_slice: SequenceSlice) -> range:
        return range(first_visible_position(seq_slice.start, self.window), seq_slice.end)

    def _slots_of(self, seq_slice: SequenceSlice) -> Tensor:
        visible = self._visible_range(seq_slice)
        first = visible.start // BLOCK_TOKENS
        blocks = seq_slice.state.block_tables[self.window].blocks[first : blocks_for(visible.stop)]
        starts = to_device([block * BLOCK_TOKENS for block in blocks], torch.long, self.device)
        slots = starts[:, None] + torch.arange(BLOCK_TOKENS, device=self.device)
        begin = visible.start - first * BLOCK_TOKENS
        return slots.flatten()[begin : begin + len(visible)]

    def _cumulative(self, sizes: list[int]) -> Tensor:
        return to_device(list(accumulate(sizes, initial=0)), torch.int32, self.device)

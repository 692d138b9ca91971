"""Chunks of several runs end to end, and the KV that each of them sees."""

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
    """At least one slice, for the layers of one window; its tensors are made when first asked for.

    Rows `starts[i]` to `starts[i + 1]` are the newest tokens of sequence `i`.
    """

    slices: list[SequenceSlice]
    first_row: int  # row of the step
    window: SlidingWindow
    device: torch.device

    @property
    def step_rows(self) -> slice:
        """Its rows in the step."""
        return slice(self.first_row, self.first_row + sum(piece.count for piece in self.slices))

    @property
    def max_seqlen_q(self) -> int:
        return max(piece.count for piece in self.slices)

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """int32 `[n + 1]`."""
        return self._cumulative([piece.count for piece in self.slices])

    @cached_property
    def seq_lens(self) -> Tensor:
        """int32 `[n]`: tokens of each sequence, those of this step included."""
        return to_device([piece.end for piece in self.slices], torch.int32, self.device)

    @property
    def max_seq_len(self) -> int:
        return max(piece.end for piece in self.slices)

    @cached_property
    def block_table(self) -> Tensor:
        """int32 `[n, b]`: each sequence's blocks in order of position, then the spare block."""
        width = blocks_for(self.max_seq_len)
        tables = [s.state.block_tables[self.window].blocks[:width] for s in self.slices]
        rows = [blocks + [0] * (width - len(blocks)) for blocks in tables]
        return to_device(rows, torch.int32, self.device)

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """int32 `[n + 1]`: where each sequence begins in `seen`."""
        return self._cumulative([len(self._visible_range(piece)) for piece in self.slices])

    @property
    def max_seqlen_k(self) -> int:
        return max(len(self._visible_range(piece)) for piece in self.slices)

    @cached_property
    def visible_slots(self) -> Tensor:
        """int64: the tokens that each sequence sees, as an index into blocks laid end to end."""
        return torch.cat([self._slots_of(piece) for piece in self.slices])

    def _visible_range(self, piece: SequenceSlice) -> range:
        return range(first_visible_position(piece.start, self.window), piece.end)

    def _slots_of(self, piece: SequenceSlice) -> Tensor:
        seen = self._visible_range(piece)
        first = seen.start // BLOCK_TOKENS
        blocks = piece.state.block_tables[self.window].blocks[first : blocks_for(seen.stop)]
        starts = to_device([block * BLOCK_TOKENS for block in blocks], torch.long, self.device)
        slots = starts[:, None] + torch.arange(BLOCK_TOKENS, device=self.device)
        begin = seen.start - first * BLOCK_TOKENS
        return slots.flatten()[begin : begin + len(seen)]

    def _cumulative(self, sizes: list[int]) -> Tensor:
        return to_device(list(accumulate(sizes, initial=0)), torch.int32, self.device)

"""Chunks of several runs end to end, and the KV that each of them sees."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gpu_worker.engines.paged.blocks import BLOCK_TOKENS, blocks_for
from gpu_worker.engines.paged.run import Slice, Window, first_seen
from gpu_worker.engines.paged.transfer import sent


@dataclass(frozen=True)
class Packed:
    """At least one slice, for the layers of one window; its tensors are made when first asked for.

    Rows `starts[i]` to `starts[i + 1]` are the newest tokens of sequence `i`.
    """

    slices: list[Slice]
    first: int  # row of the step
    window: Window
    device: torch.device

    @property
    def at(self) -> slice:
        """Its rows in the step."""
        return slice(self.first, self.first + sum(piece.count for piece in self.slices))

    @property
    def most_rows(self) -> int:
        return max(piece.count for piece in self.slices)

    @cached_property
    def starts(self) -> Tensor:
        """int32 `[n + 1]`."""
        return self._ends([piece.count for piece in self.slices])

    @cached_property
    def lengths(self) -> Tensor:
        """int32 `[n]`: tokens of each sequence, those of this step included."""
        return sent([piece.end for piece in self.slices], torch.int32, self.device)

    @property
    def most_tokens(self) -> int:
        return max(piece.end for piece in self.slices)

    @cached_property
    def table(self) -> Tensor:
        """int32 `[n, b]`: each sequence's blocks in order of position, then the spare block."""
        width = blocks_for(self.most_tokens)
        tables = [s.run.tables[self.window].blocks[:width] for s in self.slices]
        rows = [blocks + [0] * (width - len(blocks)) for blocks in tables]
        return sent(rows, torch.int32, self.device)

    @cached_property
    def seen_starts(self) -> Tensor:
        """int32 `[n + 1]`: where each sequence begins in `seen`."""
        return self._ends([len(self._seen(piece)) for piece in self.slices])

    @property
    def most_seen(self) -> int:
        return max(len(self._seen(piece)) for piece in self.slices)

    @cached_property
    def seen(self) -> Tensor:
        """int64: the tokens that each sequence sees, as an index into blocks laid end to end."""
        return torch.cat([self._slots(piece) for piece in self.slices])

    def _seen(self, piece: Slice) -> range:
        return range(first_seen(piece.start, self.window), piece.end)

    def _slots(self, piece: Slice) -> Tensor:
        seen = self._seen(piece)
        first = seen.start // BLOCK_TOKENS
        blocks = piece.run.tables[self.window].blocks[first : blocks_for(seen.stop)]
        starts = sent([block * BLOCK_TOKENS for block in blocks], torch.long, self.device)
        slots = starts[:, None] + torch.arange(BLOCK_TOKENS, device=self.device)
        begin = seen.start - first * BLOCK_TOKENS
        return slots.flatten()[begin : begin + len(seen)]

    def _ends(self, sizes: list[int]) -> Tensor:
        return sent(list(accumulate(sizes, initial=0)), torch.int32, self.device)

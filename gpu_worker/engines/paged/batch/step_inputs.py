"""A step as tensors: what is computed, where its KV goes, and which KV each token sees. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gpu_worker.engines.device_transfer import to_device
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS, NULL_BLOCK, blocks_for
from gpu_worker.engines.paged.batch.sequence_state import (
    SequenceSlice,
    SlidingWindow,
    first_visible_position,
)
from gpu_worker.engines.paged.batch.varlen_batch import VarlenBatch

# Shapes that torch's CPU kernels round alike, found by comparing bits. Others take other paths,
# and in bfloat16 one different bit grows to 1 % of the hidden states in a few layers: alone, or
# resumed, a sequence would draw other tokens than in a batch.
MIN_ROWS = 2  # of a linear layer
TILE_ROWS = 4  # queries of one attention head, rounded up to a multiple
SPLIT_BLOCKS = 32  # keys are taken in splits of this, counted from the start of the sequence;
UNEVEN_BLOCKS = range(13, 24)  # a last split of this many is summed in another order
PREFILL_ROWS = 64  # at once: they are not compared with keys that come after all of them

PrefillChunk = tuple[SequenceSlice, int]  # of a prompt, and its first row in the step


@dataclass(frozen=True)
class DecodeGroup:
    """Decoding rows `first` to `last` of a step: blocks `[n, b]`, mask `[n, 1, 1, b * 16]`."""

    first: int
    last: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PrefillTile:
    """Rows `first` to `last` of the first `runs` chunks: mask `[1, 1, rows, tokens they see]`."""

    chunks: int
    first: int
    last: int
    mask: Tensor
    _packed: dict[int, Tensor] = field(default_factory=dict)

    def mask_for_heads(self, heads: int) -> Tensor:
        """The mask of as many heads' rows, a head's behind another's; made at the first layer."""
        if heads not in self._packed:
            self._packed[heads] = self.mask.repeat(1, 1, heads, 1)
        return self._packed[heads]


@dataclass(frozen=True)
class PrefillGroup:
    """Chunks of `n` runs, the longest first; their tiles see the first of `blocks` `[n, b]`.

    `reads`, `writes`: by chunk the rows of the step `[n, t]`. Behind its own rows a chunk reads its
    last one again, and writes to a row behind all of the step's.
    """

    reads: Tensor
    writes: Tensor
    blocks: Tensor
    tiles: list[PrefillTile]


@dataclass
class StepInputs:
    """One step. Decoding slices come first, similar lengths together; each slice is packed whole.

    Attention always sees whole blocks, masked: the kernels compute the rest of a vector in another
    way than whole vectors, and rounding would depend on how a prompt was cut.
    Attention masks depend on a layer's window, so they are made at its first layer and kept.
    """

    slices: list[SequenceSlice]
    dtype: torch.dtype
    device: torch.device
    _slot_mappings: dict[SlidingWindow, Tensor] = field(default_factory=dict)
    _decode_groups_by_window: dict[SlidingWindow, list[DecodeGroup]] = field(default_factory=dict)
    _prefill_groups_by_window: dict[SlidingWindow, list[PrefillGroup]] = field(default_factory=dict)
    _varlen_batches: dict[tuple[SlidingWindow, bool], VarlenBatch | None] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.slices = sorted(self.slices, key=lambda s: (not s.is_decode, s.is_decode and s.end))
        self._decode_count = sum(s.is_decode for s in self.slices)

    @property
    def decode_slices(self) -> list[SequenceSlice]:
        """The slices that decode, in the order of the step's first rows."""
        return self.slices[: self._decode_count]

    @cached_property
    def input_ids(self) -> Tensor:
        ids = [t for s in self.slices for t in s.tokens]
        return self._tensor(_pad(ids, 0))

    @cached_property
    def positions(self) -> Tensor:
        positions = [p for s in self.slices for p in range(s.start, s.end)]
        return self._tensor(_pad(positions, 0))

    def slot_mapping(self, window: SlidingWindow) -> Tensor:
        """Where each token's KV goes, as an index into the blocks laid end to end."""
        if window not in self._slot_mappings:
            slots = [_slot_of(s, p, window) for s in self.slices for p in range(s.start, s.end)]
            self._slot_mappings[window] = self._tensor(_pad(slots, NULL_BLOCK * BLOCK_TOKENS))
        return self._slot_mappings[window]

    @cached_property
    def sampled_slices(self) -> list[SequenceSlice]:
        """The slices whose next token comes from this step, in the order of the logits' rows."""
        return [s for s in self.slices if s.is_sampled]

    @cached_property
    def logits_indices(self) -> Tensor:
        """The packed rows whose logits are needed, in the order of `sampled`; then padding."""
        rows, row = [], 0
        for piece in self.slices:
            row += piece.count
            if piece.is_sampled:
                rows.append(row - 1)
        return self._tensor(_pad(rows, 0) if rows else rows)

    @property
    def is_decode_only(self) -> bool:
        return self._decode_count == len(self.slices)

    def varlen_batch(self, window: SlidingWindow, decoding: bool) -> VarlenBatch | None:
        """The rows that decode, or those behind them, for kernels that take them all at once."""
        key = window, decoding
        if key not in self._varlen_batches:
            slices = (
                self.slices[: self._decode_count] if decoding else self.slices[self._decode_count :]
            )
            first = 0 if decoding else self._decode_count
            self._varlen_batches[key] = (
                VarlenBatch(slices, first, window, self.device) if slices else None
            )
        return self._varlen_batches[key]

    def decode_groups(self, window: SlidingWindow) -> list[DecodeGroup]:
        if window not in self._decode_groups_by_window:
            groups = _group_decodes(self.decode_slices, window)
            self._decode_groups_by_window[window] = [
                self._build_decode_group(group, window) for group in groups
            ]
        return self._decode_groups_by_window[window]

    def prefill_groups(self, window: SlidingWindow) -> list[PrefillGroup]:
        if window not in self._prefill_groups_by_window:
            firsts = accumulate((s.count for s in self.slices), initial=0)
            chunks = [*zip(self.slices, firsts, strict=False)][self._decode_count :]
            groups = _group_chunks(chunks, window)
            self._prefill_groups_by_window[window] = [
                self._build_prefill_group(group, window) for group in groups
            ]
        return self._prefill_groups_by_window[window]

    def build_decode_mask(
        self, slices: Sequence[SequenceSlice], width: int, window: SlidingWindow
    ) -> Tensor:
        """What decoding slices see of `width` blocks each, `[n, 1, 1, tokens]`."""
        seen = torch.arange(width * BLOCK_TOKENS, device=self.device)
        seen = seen + BLOCK_TOKENS * self._tensor([[first_split_block(s, window)] for s in slices])
        firsts = self._tensor([[_first_visible(s, window)] for s in slices])
        keep = (seen >= firsts) & (seen < self._tensor([[s.end] for s in slices]))
        return self._to_additive_mask(keep)[:, None, None]

    def _build_decode_group(self, rows: range, window: SlidingWindow) -> DecodeGroup:
        slices = [self.slices[row] for row in rows]
        tables = [
            s.state.block_tables[window].blocks[first_split_block(s, window) :] for s in slices
        ]
        width = round_up_blocks(max(map(len, tables)))
        blocks = self._tensor([_pad(table, NULL_BLOCK, width) for table in tables])
        return DecodeGroup(
            rows.start, rows.stop, blocks, self.build_decode_mask(slices, width, window)
        )

    def _build_prefill_group(
        self, chunks: list[PrefillChunk], window: SlidingWindow
    ) -> PrefillGroup:
        longest, spare = chunks[0][0], len(self.input_ids)
        offset, count = _offset_in_blocks(longest, window), longest.count
        length = count + -count % TILE_ROWS
        rows = [list(range(row, row + piece.count)) for piece, row in chunks]
        tables = [
            piece.state.block_tables[window].blocks[
                first_split_block(piece, window) : blocks_for(piece.end)
            ]
            for piece, _ in chunks
        ]
        tiles = [
            PrefillTile(
                sum(piece.count > first for piece, _ in chunks),
                first,
                min(first + PREFILL_ROWS, length),
                self._build_tile_mask(offset, first, min(first + PREFILL_ROWS, count), window),
            )
            for first in range(0, count, PREFILL_ROWS)
        ]
        return PrefillGroup(
            self._tensor([_pad(own, own[-1], length) for own in rows]),
            self._tensor([_pad(own, spare, length) for own in rows]),
            self._tensor(
                [_pad(table, NULL_BLOCK, round_up_blocks(len(tables[0]))) for table in tables]
            ),
            tiles,
        )

    def _build_tile_mask(self, offset: int, first: int, end: int, window: SlidingWindow) -> Tensor:
        """The mask of rows `first` to `end` of chunks that begin `offset` behind their blocks."""
        width = round_up_blocks(blocks_for(offset + end))
        seen = torch.arange(width * BLOCK_TOKENS, device=self.device)
        last = end + (first - end) % TILE_ROWS
        asking = torch.arange(offset + first, offset + last, device=self.device)[:, None]
        keep = seen <= asking
        if window is not None:
            keep &= seen > asking - window
        return self._to_additive_mask(keep)[None, None]

    def _to_additive_mask(self, keep: Tensor) -> Tensor:
        """Attention adds masks; made once here, not in every layer."""
        mask = torch.zeros(keep.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~keep, -torch.inf)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return to_device(values, torch.long, self.device)


def _pad(values: list[int], filler: int, length: int = MIN_ROWS) -> list[int]:
    return values + [filler] * (length - len(values))


def _slot_of(piece: SequenceSlice, position: int, window: SlidingWindow) -> int:
    block = piece.state.block_tables[window].blocks[position // BLOCK_TOKENS]
    return block * BLOCK_TOKENS + position % BLOCK_TOKENS


def _first_visible(piece: SequenceSlice, window: SlidingWindow) -> int:
    """The first position that the slice's first token sees."""
    return first_visible_position(piece.start, window)


def first_split_block(piece: SequenceSlice, window: SlidingWindow) -> int:
    """The first block to take for a slice: the split's in which it begins to see."""
    return _first_visible(piece, window) // (SPLIT_BLOCKS * BLOCK_TOKENS) * SPLIT_BLOCKS


def _offset_in_blocks(piece: SequenceSlice, window: SlidingWindow) -> int:
    """How far behind the first block to take for it a slice begins."""
    return piece.start - first_split_block(piece, window) * BLOCK_TOKENS


def round_up_blocks(blocks: int) -> int:
    """As many blocks or more, so that sums over them round alike."""
    rest = blocks % SPLIT_BLOCKS
    more = UNEVEN_BLOCKS.stop - rest if rest in UNEVEN_BLOCKS else 0
    return max(2, blocks + more)


def _group_decodes(decodes: list[SequenceSlice], window: SlidingWindow) -> list[range]:
    """Split rows, sorted by length, so that padding to a group's longest costs at most half."""
    groups: list[range] = []
    start, limit = 0, 0
    for row, piece in enumerate(decodes):
        seen = piece.end - _first_visible(piece, window)
        if row and seen > limit:
            groups.append(range(start, row))
            start = row
        if row == start:
            limit = max(2 * seen, 16 * BLOCK_TOKENS)
    return [*groups, range(start, len(decodes))] if decodes else []


def _group_chunks(
    chunks: Sequence[PrefillChunk], window: SlidingWindow
) -> list[list[PrefillChunk]]:
    """Group chunks of one offset, the longest first; padding is at most half of it, or a tile."""
    groups: list[list[PrefillChunk]] = []
    for chunk in sorted(chunks, key=lambda c: (_offset_in_blocks(c[0], window), -c[0].count)):
        piece, longest = chunk[0], groups[-1][0][0] if groups else chunk[0]
        same = _offset_in_blocks(piece, window) == _offset_in_blocks(longest, window)
        if groups and same and longest.count <= max(2 * piece.count, PREFILL_ROWS):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups

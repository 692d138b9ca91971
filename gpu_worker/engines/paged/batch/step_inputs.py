"""A step's input tensors: token ids, positions, KV slots, and attention masks. Pure."""

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

# Shapes that torch's CPU kernels round alike, found by comparing bits. Other shapes take other code
# paths, and in bfloat16 one different bit grows to 1 % of the hidden states in a few layers: a
# sequence that runs alone, or is resumed, would then sample other tokens than in a batch.
MIN_ROWS = 2  # rows of a linear layer's input, at least
TILE_ROWS = 4  # queries of one attention head are rounded up to a multiple of this
# Keys are summed in splits of this many blocks, counted from the sequence's start.
SPLIT_BLOCKS = 32
UNEVEN_BLOCKS = range(13, 24)  # a last split of this many blocks is summed in another order
PREFILL_ROWS = 64  # rows of a tile: it needs no keys that come after all of its rows

PrefillChunk = tuple[SequenceSlice, int]  # a slice of a prompt, and its first row in the step


@dataclass(frozen=True)
class DecodeGroup:
    """Decoding rows of a step, from `first` up to but without `last`, that are attended together.

    `blocks` `[n, b]` are the KV blocks of each row. `mask` `[n, 1, 1, b * 16]` is added to the
    scores.
    """

    first: int
    last: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PrefillTile:
    """Rows of prompt chunks that are attended together, in a `PrefillGroup`.

    They are the rows from `first` up to but without `last` of each of the group's first `chunks`
    chunks. `mask` `[1, 1, rows, tokens]` is added to the scores, over the tokens that these rows
    may attend to.
    """

    chunks: int
    first: int
    last: int
    mask: Tensor
    _packed: dict[int, Tensor] = field(default_factory=dict)

    def mask_for_heads(self, heads: int) -> Tensor:
        """Return the mask repeated `heads` times along its rows, one head after the other.

        It is made at the first layer and kept for the others.
        """
        if heads not in self._packed:
            self._packed[heads] = self.mask.repeat(1, 1, heads, 1)
        return self._packed[heads]


@dataclass(frozen=True)
class PrefillGroup:
    """Prompt chunks of `n` sequences, the longest first, padded to one length and cut into tiles.

    For each chunk `query_rows` `[n, t]` are the rows of the step that its queries come from, and
    `output_rows` `[n, t]` those that its output goes to. Padding reads the chunk's last row again,
    and is written to an extra row after all rows of the step. `blocks` `[n, b]` are the chunks' KV
    blocks; each tile attends to the first of them, as many as its mask covers.
    """

    query_rows: Tensor
    output_rows: Tensor
    blocks: Tensor
    tiles: list[PrefillTile]


@dataclass
class StepInputs:
    """The input tensors of one step, made when first asked for.

    The tokens of the slices are the step's rows, one slice after the other: decoding slices first,
    sorted by length, then prompt chunks. Attention always gets whole blocks and a mask: the kernels
    compute a vector's remainder in another way than whole vectors, so that rounding would depend on
    how a prompt was cut into chunks. Tensors that depend on a layer's window (slots, masks, groups)
    are made at the window's first layer and kept for the others.
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
        """The decoding slices; slice `i` is row `i` of the step."""
        return self.slices[: self._decode_count]

    @cached_property
    def input_ids(self) -> Tensor:
        """Token ids of all rows, int64 `[rows]`, padded to `MIN_ROWS`."""
        ids = [t for s in self.slices for t in s.tokens]
        return self._tensor(_pad(ids, 0))

    @cached_property
    def positions(self) -> Tensor:
        """Positions of all rows in their sequences, int64 `[rows]`, padded to `MIN_ROWS`."""
        positions = [p for s in self.slices for p in range(s.start, s.end)]
        return self._tensor(_pad(positions, 0))

    def slot_mapping(self, window: SlidingWindow) -> Tensor:
        """Return the slot in which the KV of each row's token is stored, int64 `[rows]`.

        Slots number the tokens of all KV blocks of the window, laid end to end. Padding rows are
        stored in the null block.
        """
        if window not in self._slot_mappings:
            slots = [_slot_of(s, p, window) for s in self.slices for p in range(s.start, s.end)]
            self._slot_mappings[window] = self._tensor(_pad(slots, NULL_BLOCK * BLOCK_TOKENS))
        return self._slot_mappings[window]

    @cached_property
    def sampled_slices(self) -> list[SequenceSlice]:
        """The slices whose next token this step samples, in the order of the logits' rows."""
        return [s for s in self.slices if s.is_sampled]

    @cached_property
    def logits_indices(self) -> Tensor:
        """The rows whose logits are needed, int64, in the order of `sampled_slices`.

        Padded to `MIN_ROWS` by repeating row 0; empty if nothing is sampled.
        """
        rows, row = [], 0
        for seq_slice in self.slices:
            row += seq_slice.count
            if seq_slice.is_sampled:
                rows.append(row - 1)
        return self._tensor(_pad(rows, 0) if rows else rows)

    @property
    def is_decode_only(self) -> bool:
        """True when no slice is a chunk of a prompt."""
        return self._decode_count == len(self.slices)

    def varlen_batch(self, window: SlidingWindow, decoding: bool) -> VarlenBatch | None:
        """Return the decoding slices, or the prompt chunks if not `decoding`, as one varlen batch.

        None if the step has no such slices. Made once for each window.
        """
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
        """Return the decoding slices in groups of like length, for attention without a kernel.

        The list is empty if no slice decodes. Made once for each window.
        """
        if window not in self._decode_groups_by_window:
            groups = _group_decodes(self.decode_slices, window)
            self._decode_groups_by_window[window] = [
                self._build_decode_group(group, window) for group in groups
            ]
        return self._decode_groups_by_window[window]

    def prefill_groups(self, window: SlidingWindow) -> list[PrefillGroup]:
        """Return the prompt chunks in groups of like length, for attention without a kernel.

        The list is empty if the step only decodes. Made once for each window.
        """
        if window not in self._prefill_groups_by_window:
            first_rows = accumulate((s.count for s in self.slices), initial=0)
            chunks = [*zip(self.slices, first_rows, strict=False)][self._decode_count :]
            groups = _group_chunks(chunks, window)
            self._prefill_groups_by_window[window] = [
                self._build_prefill_group(group, window) for group in groups
            ]
        return self._prefill_groups_by_window[window]

    def build_decode_mask(
        self, slices: Sequence[SequenceSlice], width: int, window: SlidingWindow
    ) -> Tensor:
        """Return a mask `[n, 1, 1, tokens]` for decoding slices, to be added to attention scores.

        It is 0 for tokens that a slice attends to, else minus infinity, over `width` blocks of each
        slice from its `first_split_block` on.
        """
        key_positions = torch.arange(width * BLOCK_TOKENS, device=self.device)
        key_positions = key_positions + BLOCK_TOKENS * self._tensor(
            [[first_split_block(s, window)] for s in slices]
        )
        first_positions = self._tensor([[_first_visible(s, window)] for s in slices])
        visible = (key_positions >= first_positions) & (
            key_positions < self._tensor([[s.end] for s in slices])
        )
        return self._to_additive_mask(visible)[:, None, None]

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
        longest, spare_row = chunks[0][0], len(self.input_ids)
        offset, count = _offset_in_blocks(longest, window), longest.count
        length = count + -count % TILE_ROWS
        rows = [list(range(row, row + seq_slice.count)) for seq_slice, row in chunks]
        tables = [
            seq_slice.state.block_tables[window].blocks[
                first_split_block(seq_slice, window) : blocks_for(seq_slice.end)
            ]
            for seq_slice, _ in chunks
        ]
        tiles = [
            PrefillTile(
                sum(seq_slice.count > first for seq_slice, _ in chunks),
                first,
                min(first + PREFILL_ROWS, length),
                self._build_tile_mask(offset, first, min(first + PREFILL_ROWS, count), window),
            )
            for first in range(0, count, PREFILL_ROWS)
        ]
        return PrefillGroup(
            self._tensor([_pad(own_rows, own_rows[-1], length) for own_rows in rows]),
            self._tensor([_pad(own_rows, spare_row, length) for own_rows in rows]),
            self._tensor(
                [_pad(table, NULL_BLOCK, round_up_blocks(len(tables[0]))) for table in tables]
            ),
            tiles,
        )

    def _build_tile_mask(self, offset: int, first: int, end: int, window: SlidingWindow) -> Tensor:
        """Return the causal mask of rows `first` up to `end` of chunks.

        The chunks begin `offset` tokens behind the start of their first block.
        """
        width = round_up_blocks(blocks_for(offset + end))
        key_positions = torch.arange(width * BLOCK_TOKENS, device=self.device)
        last = end + (first - end) % TILE_ROWS
        query_positions = torch.arange(offset + first, offset + last, device=self.device)[:, None]
        visible = key_positions <= query_positions
        if window is not None:
            visible &= key_positions > query_positions - window
        return self._to_additive_mask(visible)[None, None]

    def _to_additive_mask(self, visible: Tensor) -> Tensor:
        """Return 0 where `visible`, else minus infinity: converted once, not in every layer."""
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~visible, -torch.inf)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return to_device(values, torch.long, self.device)


def _pad(values: list[int], filler: int, length: int = MIN_ROWS) -> list[int]:
    return values + [filler] * (length - len(values))


def _slot_of(seq_slice: SequenceSlice, position: int, window: SlidingWindow) -> int:
    block = seq_slice.state.block_tables[window].blocks[position // BLOCK_TOKENS]
    return block * BLOCK_TOKENS + position % BLOCK_TOKENS


def _first_visible(seq_slice: SequenceSlice, window: SlidingWindow) -> int:
    """Return the first position that the slice's first token attends to."""
    return first_visible_position(seq_slice.start, window)


def first_split_block(seq_slice: SequenceSlice, window: SlidingWindow) -> int:
    """Return the index of the first block that attention reads for a slice, without a kernel.

    Attention sums keys in splits of `SPLIT_BLOCKS` blocks, counted from the start of the sequence.
    The block is the first of the split that holds the first token that the slice attends to.
    """
    return _first_visible(seq_slice, window) // (SPLIT_BLOCKS * BLOCK_TOKENS) * SPLIT_BLOCKS


def _offset_in_blocks(seq_slice: SequenceSlice, window: SlidingWindow) -> int:
    """Return how many tokens behind the start of its `first_split_block` a slice begins."""
    return seq_slice.start - first_split_block(seq_slice, window) * BLOCK_TOKENS


def round_up_blocks(blocks: int) -> int:
    """Return `blocks` or a few more, so that sums over them are computed in the same order.

    The number is at least 2. A last split whose size is in `UNEVEN_BLOCKS`, which would be summed
    in another order, is enlarged to 24 blocks.
    """
    rest = blocks % SPLIT_BLOCKS
    more = UNEVEN_BLOCKS.stop - rest if rest in UNEVEN_BLOCKS else 0
    return max(2, blocks + more)


def _group_decodes(decodes: list[SequenceSlice], window: SlidingWindow) -> list[range]:
    """Group rows, sorted by length, so that at most half of a group is padding to its longest."""
    groups: list[range] = []
    start, limit = 0, 0
    for row, seq_slice in enumerate(decodes):
        visible_count = seq_slice.end - _first_visible(seq_slice, window)
        if row and visible_count > limit:
            groups.append(range(start, row))
            start = row
        if row == start:
            limit = max(2 * visible_count, 16 * BLOCK_TOKENS)
    return [*groups, range(start, len(decodes))] if decodes else []


def _group_chunks(
    chunks: Sequence[PrefillChunk], window: SlidingWindow
) -> list[list[PrefillChunk]]:
    """Group chunks of one offset, the longest first.

    A chunk is padded by at most its own length, or within one tile.
    """
    groups: list[list[PrefillChunk]] = []
    for chunk in sorted(chunks, key=lambda c: (_offset_in_blocks(c[0], window), -c[0].count)):
        seq_slice, longest = chunk[0], groups[-1][0][0] if groups else chunk[0]
        same_offset = _offset_in_blocks(seq_slice, window) == _offset_in_blocks(longest, window)
        if groups and same_offset and longest.count <= max(2 * seq_slice.count, PREFILL_ROWS):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups

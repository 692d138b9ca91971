"""A step as tensors: what is computed, where its KV goes, and which KV each token sees."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gpu_worker.engines.paged.blocks import BLOCK_TOKENS, TRASH, blocks_for
from gpu_worker.engines.paged.kernels.packed import Packed
from gpu_worker.engines.paged.run import Slice, Window, first_seen
from gpu_worker.engines.paged.transfer import sent

# Shapes that torch's CPU kernels round alike, found by comparing bits. Others take other paths,
# and in bfloat16 one different bit grows to 1 % of the hidden states in a few layers: alone, or
# resumed, a sequence would draw other tokens than in a batch.
MIN_ROWS = 2  # of a linear layer
TILE_ROWS = 4  # queries of one attention head, rounded up to a multiple
SPLIT_BLOCKS = 32  # keys are taken in splits of this, counted from the start of the sequence;
UNEVEN_BLOCKS = range(13, 24)  # a last split of this many is summed in another order
PREFILL_ROWS = 64  # at once: they are not compared with keys that come after all of them

Chunk = tuple[Slice, int]  # of a prompt, and its first row in the step


@dataclass(frozen=True)
class Decodes:
    """Decoding rows `first` to `last` of a step: blocks `[n, b]`, mask `[n, 1, 1, b * 16]`."""

    first: int
    last: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Tile:
    """Rows `first` to `last` of the first `runs` chunks: mask `[1, 1, rows, tokens they see]`."""

    runs: int
    first: int
    last: int
    mask: Tensor
    _packed: dict[int, Tensor] = field(default_factory=dict)

    def mask_of(self, heads: int) -> Tensor:
        """The mask of as many heads' rows, a head's behind another's; made at the first layer."""
        if heads not in self._packed:
            self._packed[heads] = self.mask.repeat(1, 1, heads, 1)
        return self._packed[heads]


@dataclass(frozen=True)
class Prefill:
    """Chunks of `n` runs, the longest first; their tiles see the first of `blocks` `[n, b]`.

    `reads`, `writes`: by chunk the rows of the step `[n, t]`. Behind its own rows a chunk reads its
    last one again, and writes to a row behind all of the step's.
    """

    reads: Tensor
    writes: Tensor
    blocks: Tensor
    tiles: list[Tile]


@dataclass
class Plan:
    """One step. Decoding slices come first, similar lengths together; each slice is packed whole.

    Attention always sees whole blocks, masked: the kernels compute the rest of a vector in another
    way than whole vectors, and rounding would depend on how a prompt was cut.
    Attention masks depend on a layer's window, so they are made at its first layer and kept.
    """

    slices: list[Slice]
    dtype: torch.dtype
    device: torch.device
    _slots: dict[Window, Tensor] = field(default_factory=dict)
    _decodes: dict[Window, list[Decodes]] = field(default_factory=dict)
    _prefills: dict[Window, list[Prefill]] = field(default_factory=dict)
    _packed: dict[tuple[Window, bool], Packed | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slices = sorted(self.slices, key=lambda s: (not s.is_decode, s.is_decode and s.end))
        self._decoding = sum(s.is_decode for s in self.slices)

    @property
    def decoding(self) -> list[Slice]:
        """The slices that decode, in the order of the step's first rows."""
        return self.slices[: self._decoding]

    @cached_property
    def ids(self) -> Tensor:
        ids = [t for s in self.slices for t in s.tokens]
        return self._tensor(_padded(ids, 0))

    @cached_property
    def positions(self) -> Tensor:
        positions = [p for s in self.slices for p in range(s.start, s.end)]
        return self._tensor(_padded(positions, 0))

    def slots(self, window: Window) -> Tensor:
        """Where each token's KV goes, as an index into the blocks laid end to end."""
        if window not in self._slots:
            slots = [_slot(s, p, window) for s in self.slices for p in range(s.start, s.end)]
            self._slots[window] = self._tensor(_padded(slots, TRASH * BLOCK_TOKENS))
        return self._slots[window]

    @cached_property
    def sampled(self) -> list[Slice]:
        """The slices whose next token comes from this step, in the order of the logits' rows."""
        return [s for s in self.slices if s.samples]

    @cached_property
    def rows(self) -> Tensor:
        """The packed rows whose logits are needed, in the order of `sampled`; then padding."""
        rows, row = [], 0
        for piece in self.slices:
            row += piece.count
            if piece.samples:
                rows.append(row - 1)
        return self._tensor(_padded(rows, 0) if rows else rows)

    @property
    def decodes_only(self) -> bool:
        return self._decoding == len(self.slices)

    def packed(self, window: Window, decoding: bool) -> Packed | None:
        """The rows that decode, or those behind them, for kernels that take them all at once."""
        key = window, decoding
        if key not in self._packed:
            slices = self.slices[: self._decoding] if decoding else self.slices[self._decoding :]
            first = 0 if decoding else self._decoding
            self._packed[key] = Packed(slices, first, window, self.device) if slices else None
        return self._packed[key]

    def decodes(self, window: Window) -> list[Decodes]:
        if window not in self._decodes:
            groups = _groups(self.decoding, window)
            self._decodes[window] = [self._decode(group, window) for group in groups]
        return self._decodes[window]

    def prefills(self, window: Window) -> list[Prefill]:
        if window not in self._prefills:
            firsts = accumulate((s.count for s in self.slices), initial=0)
            chunks = [*zip(self.slices, firsts, strict=False)][self._decoding :]
            groups = _alike(chunks, window)
            self._prefills[window] = [self._prefill(group, window) for group in groups]
        return self._prefills[window]

    def decode_mask(self, slices: Sequence[Slice], width: int, window: Window) -> Tensor:
        """What decoding slices see of `width` blocks each, `[n, 1, 1, tokens]`."""
        seen = torch.arange(width * BLOCK_TOKENS, device=self.device)
        seen = seen + BLOCK_TOKENS * self._tensor([[split(s, window)] for s in slices])
        firsts = self._tensor([[_first(s, window)] for s in slices])
        keep = (seen >= firsts) & (seen < self._tensor([[s.end] for s in slices]))
        return self._additive(keep)[:, None, None]

    def _decode(self, rows: range, window: Window) -> Decodes:
        slices = [self.slices[row] for row in rows]
        tables = [s.run.tables[window].blocks[split(s, window) :] for s in slices]
        width = even(max(map(len, tables)))
        blocks = self._tensor([_padded(table, TRASH, width) for table in tables])
        return Decodes(rows.start, rows.stop, blocks, self.decode_mask(slices, width, window))

    def _prefill(self, chunks: list[Chunk], window: Window) -> Prefill:
        longest, spare = chunks[0][0], len(self.ids)
        offset, count = _offset(longest, window), longest.count
        length = count + -count % TILE_ROWS
        rows = [list(range(row, row + piece.count)) for piece, row in chunks]
        tables = [
            piece.run.tables[window].blocks[split(piece, window) : blocks_for(piece.end)]
            for piece, _ in chunks
        ]
        tiles = [
            Tile(
                sum(piece.count > first for piece, _ in chunks),
                first,
                min(first + PREFILL_ROWS, length),
                self._tile(offset, first, min(first + PREFILL_ROWS, count), window),
            )
            for first in range(0, count, PREFILL_ROWS)
        ]
        return Prefill(
            self._tensor([_padded(own, own[-1], length) for own in rows]),
            self._tensor([_padded(own, spare, length) for own in rows]),
            self._tensor([_padded(table, TRASH, even(len(tables[0]))) for table in tables]),
            tiles,
        )

    def _tile(self, offset: int, first: int, end: int, window: Window) -> Tensor:
        """The mask of rows `first` to `end` of chunks that begin `offset` behind their blocks."""
        width = even(blocks_for(offset + end))
        seen = torch.arange(width * BLOCK_TOKENS, device=self.device)
        last = end + (first - end) % TILE_ROWS
        asking = torch.arange(offset + first, offset + last, device=self.device)[:, None]
        keep = seen <= asking
        if window is not None:
            keep &= seen > asking - window
        return self._additive(keep)[None, None]

    def _additive(self, keep: Tensor) -> Tensor:
        """Attention adds masks; made once here, not in every layer."""
        mask = torch.zeros(keep.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~keep, -torch.inf)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return sent(values, torch.long, self.device)


def _padded(values: list[int], filler: int, length: int = MIN_ROWS) -> list[int]:
    return values + [filler] * (length - len(values))


def _slot(piece: Slice, position: int, window: Window) -> int:
    block = piece.run.tables[window].blocks[position // BLOCK_TOKENS]
    return block * BLOCK_TOKENS + position % BLOCK_TOKENS


def _first(piece: Slice, window: Window) -> int:
    """The first position that the slice's first token sees."""
    return first_seen(piece.start, window)


def split(piece: Slice, window: Window) -> int:
    """The first block to take for a slice: the split's in which it begins to see."""
    return _first(piece, window) // (SPLIT_BLOCKS * BLOCK_TOKENS) * SPLIT_BLOCKS


def _offset(piece: Slice, window: Window) -> int:
    """How far behind the first block to take for it a slice begins."""
    return piece.start - split(piece, window) * BLOCK_TOKENS


def even(blocks: int) -> int:
    """As many blocks or more, so that sums over them round alike."""
    rest = blocks % SPLIT_BLOCKS
    more = UNEVEN_BLOCKS.stop - rest if rest in UNEVEN_BLOCKS else 0
    return max(2, blocks + more)


def _groups(decodes: list[Slice], window: Window) -> list[range]:
    """Split rows, sorted by length, so that padding to a group's longest costs at most half."""
    groups: list[range] = []
    start, limit = 0, 0
    for row, piece in enumerate(decodes):
        seen = piece.end - _first(piece, window)
        if row and seen > limit:
            groups.append(range(start, row))
            start = row
        if row == start:
            limit = max(2 * seen, 16 * BLOCK_TOKENS)
    return [*groups, range(start, len(decodes))] if decodes else []


def _alike(chunks: Sequence[Chunk], window: Window) -> list[list[Chunk]]:
    """Group chunks of one offset, the longest first; padding is at most half of it, or a tile."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda c: (_offset(c[0], window), -c[0].count)):
        piece, longest = chunk[0], groups[-1][0][0] if groups else chunk[0]
        same = _offset(piece, window) == _offset(longest, window)
        if groups and same and longest.count <= max(2 * piece.count, PREFILL_ROWS):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups

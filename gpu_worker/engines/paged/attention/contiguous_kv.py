"""KV of decoding runs, each in one piece: a CPU's attention reads it without gathering blocks.

Blocks remain the truth. A strip is filled from them when its run begins to decode, and gets each
token after that as they do. Where strips do not fit their memory, blocks are gathered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.engines.paged.attention.sdpa import attend_decode
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS, NULL_BLOCK, blocks_for
from gpu_worker.engines.paged.batch.sequence_state import SequenceState, SlidingWindow
from gpu_worker.engines.paged.batch.step_inputs import (
    SPLIT_BLOCKS,
    UNEVEN_BLOCKS,
    StepInputs,
    first_split_block,
    round_up_blocks,
)

MAX_SHARE = 0.5  # of the bytes of the blocks, at most
LEAST_CAPACITY = UNEVEN_BLOCKS.start - 1

KvPair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class KvCopy:
    """A run's KV up to token `filled`, from block `start` of its table on."""

    state: SequenceState
    start_block: int
    filled_tokens: int

    @property
    def content_key(self) -> tuple[int, int, int]:
        return id(self.state), self.start_block, self.filled_tokens


@dataclass(frozen=True)
class CopyAssignment:
    """Who has which strip: `order` names, by strip, one of those that wanted one.

    First strips are moved, each to another's place; then `fills` are filled.
    """

    order: list[int]
    moves: list[tuple[int, int]]
    fills: list[int]


def assign_copies(strips: Sequence[KvCopy], wanted: Sequence[KvCopy]) -> CopyAssignment:
    """Find strips for those `wanted`: as they are, moved, or new ones; without a gap."""
    index = {strip.content_key: n for n, strip in enumerate(wanted)}
    owners = [index.get(strip.content_key) for strip in strips]
    order = (owners + [None] * len(wanted))[: len(wanted)]
    free = [number for number, owner in enumerate(order) if owner is None]
    moves = []
    for number, owner in enumerate(owners[len(wanted) :], len(wanted)):
        if owner is not None:
            moves.append((number, free.pop()))
            order[moves[-1][1]] = owner
    new = iter(n for n in range(len(wanted)) if n not in set(owners))
    return CopyAssignment([next(new) if n is None else n for n in order], moves, free)


@dataclass(frozen=True)
class _CopyUpdate:
    """What a shelf does for one step.

    `rows`: the step's, by strip; `at`: which token of its strip each one's KV becomes. They see
    the first `tokens` of their strips under `mask` `[n, 1, 1, tokens]`.
    """

    rows: Tensor
    token_positions: Tensor
    tokens: int
    mask: Tensor
    moves: list[tuple[int, int]]
    fills: list[tuple[int, Tensor]]  # strip and blocks

    def update(self, strips: Tensor, blocks: Tensor, new: Tensor) -> Tensor:
        """Bring strips up to date from a layer's blocks and the step's KV `[1, heads, rows, dim]`.

        Returns what the step sees, `[n, tokens, heads, dim]`.
        """
        for before, after in self.moves:
            strips[after] = strips[before]
        for strip, table in self.fills:
            into = strips[strip].view(-1, len(table), *blocks.shape[1::2])
            into.copy_(blocks.index_select(0, table).permute(2, 0, 1, 3))
        count = len(self.rows)
        rows = new[0].index_select(1, self.rows)
        strips[torch.arange(count), :, self.token_positions] = rows.transpose(0, 1)
        return strips[:count, :, : self.tokens].transpose(1, 2)


class _SizeClass:
    """Strips of `capacity` blocks: `kv` by layer, each `[strips, heads, tokens, dim]`.

    By head, as attention reads them: that takes 0.7 of the time on an AMD EPYC of its fifth
    generation, where an Intel Xeon does not care.
    """

    def __init__(self, capacity: int, kv: dict[int, KvPair]) -> None:
        self._capacity, self.kv = capacity, kv
        self._copies: list[KvCopy] = []

    @property
    def copy_count(self) -> int:
        return next(len(keys) for keys, _ in self.kv.values())

    def prepare_update(
        self, plan: StepInputs, rows: Sequence[int], window: SlidingWindow
    ) -> _CopyUpdate:
        slices = [plan.slices[row] for row in rows]
        wanted = [KvCopy(s.state, first_split_block(s, window), s.start) for s in slices]
        placing = assign_copies(self._copies, wanted)
        strips = [
            KvCopy(wanted[n].state, wanted[n].start_block, slices[n].end) for n in placing.order
        ]
        self._copies = strips
        width = round_up_blocks(
            max(blocks_for(strip.filled_tokens) - strip.start_block for strip in strips)
        )
        return _CopyUpdate(
            torch.tensor([rows[n] for n in placing.order]),
            torch.tensor([s.filled_tokens - 1 - s.start_block * BLOCK_TOKENS for s in strips]),
            width * BLOCK_TOKENS,
            plan.build_decode_mask([slices[n] for n in placing.order], width, window),
            placing.moves,
            [(n, torch.tensor(self._padded_table(strips[n], window))) for n in placing.fills],
        )

    def _padded_table(self, strip: KvCopy, window: SlidingWindow) -> list[int]:
        """Blocks for the whole strip: a NaN that its last owner left would be seen, even masked."""
        table = strip.state.block_tables[window].blocks[strip.start_block :]
        return table + [NULL_BLOCK] * (self._capacity - len(table))


class ContiguousKv:
    """The strips of the layers of one `window`; `pools`: these layers' blocks."""

    def __init__(self, pools: Mapping[int, KvPair], window: SlidingWindow) -> None:
        self._pools, self._window = pools, window
        self._budget = MAX_SHARE * next(len(keys) - 1 for keys, _ in pools.values())  # in blocks
        self._size_classes: dict[int, _SizeClass] = {}
        self._inputs: StepInputs | None = None
        self._updates: list[tuple[_SizeClass, _CopyUpdate]] = []
        self._pending_layers: set[int] = set()  # layers that the current step has not come to

    def clear(self) -> None:
        """Free the memory; strips are made again as they are needed."""
        self._size_classes.clear()

    def attend_decode(
        self,
        layer: int,
        plan: StepInputs,
        query: Tensor,
        new: KvPair,
        scaling: float | None,
        out: Tensor,
    ) -> bool:
        """Attention of a step's decoding rows into `out` `[rows, heads, dim]`, in one layer.

        False where strips for them do not fit; nothing was computed then.
        """
        if plan is not self._inputs:
            self._prepare_updates(plan)
        self._pending_layers.discard(layer)
        for shelf, step in self._updates:
            both = zip(shelf.kv[layer], self._pools[layer], new, strict=True)
            keys, values = (step.update(*each) for each in both)
            rows = query[0].index_select(1, step.rows)
            out.index_copy_(0, step.rows, attend_decode(rows, keys, values, step.mask, scaling))
        return bool(self._updates)

    def _prepare_updates(self, plan: StepInputs) -> None:
        if self._pending_layers:  # the last step broke off: it is unknown what strips hold
            self._size_classes.clear()
        self._inputs, self._pending_layers = plan, set(self._pools)
        rows = self._rows_by_capacity(plan)
        fits = self._ensure_copies({capacity: len(of) for capacity, of in rows.items()})
        shelves = {capacity: self._size_classes[capacity] for capacity in rows} if fits else {}
        self._updates = [
            (s, s.prepare_update(plan, rows[c], self._window)) for c, s in shelves.items()
        ]

    def _rows_by_capacity(self, plan: StepInputs) -> dict[int, list[int]]:
        """The decoding rows of a step by the capacity that they need."""
        rows: dict[int, list[int]] = {}
        for row, piece in enumerate(plan.decode_slices):
            needed = blocks_for(piece.end) - first_split_block(piece, self._window)
            rows.setdefault(_capacity_for(needed), []).append(row)
        return rows

    def _ensure_copies(self, counts: Mapping[int, int]) -> bool:
        """Have at least so many strips of each capacity; False if they do not fit."""
        kept = {c: s for c, s in self._size_classes.items() if s.copy_count >= counts.get(c, 0)}
        needed = {c: 1 << (n - 1).bit_length() for c, n in counts.items() if c not in kept}
        if not needed:
            return True
        if (
            self._count_blocks({c: s.copy_count for c, s in kept.items()})
            + self._count_blocks(needed)
            > self._budget
        ):
            kept, needed = {}, dict(counts)
        self._size_classes = kept
        if self._count_blocks(needed) > self._budget:
            return False
        self._size_classes |= {c: _SizeClass(c, self._allocate(c, n)) for c, n in needed.items()}
        return True

    def _count_blocks(self, counts: Mapping[int, int]) -> int:
        return sum(capacity * count for capacity, count in counts.items())

    def _allocate(self, capacity: int, count: int) -> dict[int, KvPair]:
        return {
            layer: (_allocate_copies(k, capacity, count), _allocate_copies(v, capacity, count))
            for layer, (k, v) in self._pools.items()
        }


def _capacity_for(blocks: int) -> int:
    """Of a strip for so many blocks: it holds as many as attention takes for them, or some more."""
    if blocks <= LEAST_CAPACITY:
        return LEAST_CAPACITY
    splits = -(-blocks // SPLIT_BLOCKS)
    return SPLIT_BLOCKS << (splits - 1).bit_length()


def _allocate_copies(blocks: Tensor, capacity: int, count: int) -> Tensor:
    """Memory that is not touched before it is filled."""
    _, tokens, heads, dim = blocks.shape
    return blocks.new_empty((count, heads, capacity * tokens, dim))

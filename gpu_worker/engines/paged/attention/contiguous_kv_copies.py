"""Contiguous copies of decoding sequences' KV, so that a CPU attends without gathering blocks.

The blocks stay complete and authoritative. A copy is filled from them when its sequence begins to
decode, and gets each later token as the blocks do. Where copies do not fit their memory, blocks are
gathered instead.
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

MAX_SHARE = 0.5  # copies take at most this share of the bytes of the blocks
MIN_CAPACITY = UNEVEN_BLOCKS.start - 1  # blocks of the smallest copy

KvPair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class KvCopy:
    """The content of one copy: a sequence's KV from block `start_block` on, up to `filled_tokens`.

    Both count from the start of the sequence; the token at position `filled_tokens` is not
    included.
    """

    state: SequenceState
    start_block: int
    filled_tokens: int

    @property
    def content_key(self) -> tuple[int, int, int]:
        """A key that is equal for copies of the same sequence, the same start and the same end."""
        return id(self.state), self.start_block, self.filled_tokens


@dataclass(frozen=True)
class CopyAssignment:
    """The decision which copy is to hold which of the wanted contents, and how it gets there.

    `order` gives for each copy the index of the wanted content that it is to hold. First `moves`
    are made, each a pair of source and target copy; then the copies in `fills` are filled from
    blocks.
    """

    order: list[int]
    moves: list[tuple[int, int]]
    fills: list[int]


def assign_copies(copies: Sequence[KvCopy], wanted: Sequence[KvCopy]) -> CopyAssignment:
    """Decide which of the first `len(wanted)` copies is to hold each of the `wanted` contents.

    A copy that already holds a wanted content keeps it, or is moved if it lies further back; all
    others are to be filled. Nothing is copied here.
    """
    index = {kv_copy.content_key: n for n, kv_copy in enumerate(wanted)}
    owners = [index.get(kv_copy.content_key) for kv_copy in copies]
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
    """One step's update of the copies of a size class, the same in every layer.

    `rows`: for each copy, the row of the step that decodes its sequence. `token_positions`: where
    in its copy that row's KV goes. Attention reads the first `tokens` of each copy under the
    additive `mask` `[n, 1, 1, tokens]`.
    """

    rows: Tensor
    token_positions: Tensor
    tokens: int
    mask: Tensor
    moves: list[tuple[int, int]]
    fills: list[tuple[int, Tensor]]  # index of a copy, and the blocks to fill it from

    def update(self, copies: Tensor, blocks: Tensor, new: Tensor) -> Tensor:
        """Update a layer's copies from its blocks and the step's KV `new` `[1, heads, rows, dim]`.

        Returns the KV that the step's rows attend to, `[n, tokens, heads, dim]`.
        """
        for before, after in self.moves:
            copies[after] = copies[before]
        for index, table in self.fills:
            into = copies[index].view(-1, len(table), *blocks.shape[1::2])
            into.copy_(blocks.index_select(0, table).permute(2, 0, 1, 3))
        count = len(self.rows)
        rows = new[0].index_select(1, self.rows)
        copies[torch.arange(count), :, self.token_positions] = rows.transpose(0, 1)
        return copies[:count, :, : self.tokens].transpose(1, 2)


class _SizeClass:
    """Copies of `capacity` blocks each: `kv` by layer, `[copies, heads, tokens, dim]`.

    Heads come before tokens, as attention reads them: that takes 0.7 of the time on a
    fifth-generation AMD EPYC, and makes no difference on an Intel Xeon.
    """

    def __init__(self, capacity: int, kv: dict[int, KvPair]) -> None:
        self._capacity, self.kv = capacity, kv
        self._copies: list[KvCopy] = []

    @property
    def copy_count(self) -> int:
        """The number of copies that there is memory for."""
        return next(len(keys) for keys, _ in self.kv.values())

    def prepare_update(
        self, inputs: StepInputs, rows: Sequence[int], window: SlidingWindow
    ) -> _CopyUpdate:
        """Assign copies to decoding `rows` of a step, and return what to do in each layer."""
        slices = [inputs.slices[row] for row in rows]
        wanted = [KvCopy(s.state, first_split_block(s, window), s.start) for s in slices]
        assignment = assign_copies(self._copies, wanted)
        copies = [
            KvCopy(wanted[n].state, wanted[n].start_block, slices[n].end) for n in assignment.order
        ]
        self._copies = copies
        width = round_up_blocks(
            max(blocks_for(kv_copy.filled_tokens) - kv_copy.start_block for kv_copy in copies)
        )
        return _CopyUpdate(
            torch.tensor([rows[n] for n in assignment.order]),
            torch.tensor([s.filled_tokens - 1 - s.start_block * BLOCK_TOKENS for s in copies]),
            width * BLOCK_TOKENS,
            inputs.build_decode_mask([slices[n] for n in assignment.order], width, window),
            assignment.moves,
            [(n, torch.tensor(self._padded_table(copies[n], window))) for n in assignment.fills],
        )

    def _padded_table(self, kv_copy: KvCopy, window: SlidingWindow) -> list[int]:
        """Return blocks for the whole copy, padded with the null block.

        A NaN that the copy's last owner left would reach the result, even where it is masked.
        """
        table = kv_copy.state.block_tables[window].blocks[kv_copy.start_block :]
        return table + [NULL_BLOCK] * (self._capacity - len(table))


class ContiguousKv:
    """Contiguous copies of decoding sequences' KV on a CPU, for the layers of one window.

    `pools` holds the keys and values of the KV blocks by layer number. Copies take at most
    `MAX_SHARE` of the memory of these blocks.
    """

    def __init__(self, pools: Mapping[int, KvPair], window: SlidingWindow) -> None:
        self._pools, self._window = pools, window
        self._budget = MAX_SHARE * next(len(keys) - 1 for keys, _ in pools.values())  # in blocks
        self._size_classes: dict[int, _SizeClass] = {}
        self._inputs: StepInputs | None = None
        self._updates: list[tuple[_SizeClass, _CopyUpdate]] = []
        self._pending_layers: set[int] = set()  # layers that the current step has not reached

    def clear(self) -> None:
        """Free the memory of all copies. They are filled from the blocks again at the next step."""
        self._size_classes.clear()

    def attend_decode(
        self,
        layer: int,
        inputs: StepInputs,
        query: Tensor,
        new: KvPair,
        scaling: float | None,
        out: Tensor,
    ) -> bool:
        """Compute one layer's attention for a step's decoding rows, if their copies fit the memory.

        `query` is `[1, heads, rows, dim]`, `new` the step's keys and values
        `[1, kv_heads, rows, dim]`, which are added to the copies. Returns True when the output of
        these rows is in `out` `[rows, heads, dim]`. Returns False and leaves `out` alone when the
        copies do not fit or no row decodes.
        """
        if inputs is not self._inputs:
            self._prepare_updates(inputs)
        self._pending_layers.discard(layer)
        for size_class, copy_update in self._updates:
            updated = zip(size_class.kv[layer], self._pools[layer], new, strict=True)
            keys, values = (copy_update.update(*each) for each in updated)
            rows = query[0].index_select(1, copy_update.rows)
            out.index_copy_(
                0, copy_update.rows, attend_decode(rows, keys, values, copy_update.mask, scaling)
            )
        return bool(self._updates)

    def _prepare_updates(self, inputs: StepInputs) -> None:
        if self._pending_layers:  # the last step broke off: what the copies hold is unknown
            self._size_classes.clear()
        self._inputs, self._pending_layers = inputs, set(self._pools)
        rows = self._rows_by_capacity(inputs)
        fits = self._ensure_copies(
            {capacity: len(class_rows) for capacity, class_rows in rows.items()}
        )
        size_classes = {capacity: self._size_classes[capacity] for capacity in rows} if fits else {}
        self._updates = [
            (s, s.prepare_update(inputs, rows[c], self._window)) for c, s in size_classes.items()
        ]

    def _rows_by_capacity(self, inputs: StepInputs) -> dict[int, list[int]]:
        """Group the decoding rows of a step by the capacity in blocks that they need."""
        rows: dict[int, list[int]] = {}
        for row, seq_slice in enumerate(inputs.decode_slices):
            needed = blocks_for(seq_slice.end) - first_split_block(seq_slice, self._window)
            rows.setdefault(_capacity_for(needed), []).append(row)
        return rows

    def _ensure_copies(self, counts: Mapping[int, int]) -> bool:
        """Make sure of at least `counts` copies of each capacity; False if they do not fit."""
        kept_classes = {
            c: s for c, s in self._size_classes.items() if s.copy_count >= counts.get(c, 0)
        }
        needed = {c: 1 << (n - 1).bit_length() for c, n in counts.items() if c not in kept_classes}
        if not needed:
            return True
        if (
            self._count_blocks({c: s.copy_count for c, s in kept_classes.items()})
            + self._count_blocks(needed)
            > self._budget
        ):
            kept_classes, needed = {}, dict(counts)
        self._size_classes = kept_classes
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
    """Return the capacity of a copy for `blocks` blocks.

    It is no less than what attention reads for them (see `round_up_blocks`).
    """
    if blocks <= MIN_CAPACITY:
        return MIN_CAPACITY
    splits = -(-blocks // SPLIT_BLOCKS)
    return SPLIT_BLOCKS << (splits - 1).bit_length()


def _allocate_copies(blocks: Tensor, capacity: int, count: int) -> Tensor:
    """Allocate memory for copies without touching its pages before they are filled."""
    _, tokens, heads, dim = blocks.shape
    return blocks.new_empty((count, heads, capacity * tokens, dim))

"""KV of decoding runs, each in one piece: a CPU's attention reads it without gathering blocks.

Blocks remain the truth. A strip is filled from them when its run begins to decode, and gets each
token after that as they do. Where strips do not fit their memory, blocks are gathered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.engines.paged.blocks import BLOCK_TOKENS, TRASH, blocks_for
from gpu_worker.engines.paged.plan import SPLIT_BLOCKS, UNEVEN_BLOCKS, Plan, even, split
from gpu_worker.engines.paged.run import Run, Window
from gpu_worker.engines.paged.sdpa import decode

SHARE = 0.5  # of the bytes of the blocks, at most
LEAST_CAPACITY = UNEVEN_BLOCKS.start - 1

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Strip:
    """A run's KV up to token `filled`, from block `start` of its table on."""

    run: Run
    start: int
    filled: int

    @property
    def content(self) -> tuple[int, int, int]:
        return id(self.run), self.start, self.filled


@dataclass(frozen=True)
class Placing:
    """Who has which strip: `order` names, by strip, one of those that wanted one.

    First strips are moved, each to another's place; then `fills` are filled.
    """

    order: list[int]
    moves: list[tuple[int, int]]
    fills: list[int]


def place(strips: Sequence[Strip], wanted: Sequence[Strip]) -> Placing:
    """Find strips for those `wanted`: as they are, moved, or new ones; without a gap."""
    index = {strip.content: n for n, strip in enumerate(wanted)}
    owners = [index.get(strip.content) for strip in strips]
    order = (owners + [None] * len(wanted))[: len(wanted)]
    free = [number for number, owner in enumerate(order) if owner is None]
    moves = []
    for number, owner in enumerate(owners[len(wanted) :], len(wanted)):
        if owner is not None:
            moves.append((number, free.pop()))
            order[moves[-1][1]] = owner
    new = iter(n for n in range(len(wanted)) if n not in set(owners))
    return Placing([next(new) if n is None else n for n in order], moves, free)


@dataclass(frozen=True)
class _Step:
    """What a shelf does for one step.

    `rows`: the step's, by strip; `at`: which token of its strip each one's KV becomes. They see
    the first `tokens` of their strips under `mask` `[n, 1, 1, tokens]`.
    """

    rows: Tensor
    at: Tensor
    tokens: int
    mask: Tensor
    moves: list[tuple[int, int]]
    fills: list[tuple[int, Tensor]]  # strip and blocks

    def bring(self, strips: Tensor, blocks: Tensor, new: Tensor) -> Tensor:
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
        strips[torch.arange(count), :, self.at] = rows.transpose(0, 1)
        return strips[:count, :, : self.tokens].transpose(1, 2)


class _Shelf:
    """Strips of `capacity` blocks: `kv` by layer, each `[strips, heads, tokens, dim]`.

    By head, as attention reads them: that takes 0.7 of the time on an AMD EPYC of its fifth
    generation, where an Intel Xeon does not care.
    """

    def __init__(self, capacity: int, kv: dict[int, KV]) -> None:
        self._capacity, self.kv = capacity, kv
        self._strips: list[Strip] = []

    @property
    def count(self) -> int:
        return next(len(keys) for keys, _ in self.kv.values())

    def arrange(self, plan: Plan, rows: Sequence[int], window: Window) -> _Step:
        slices = [plan.slices[row] for row in rows]
        wanted = [Strip(s.run, split(s, window), s.start) for s in slices]
        placing = place(self._strips, wanted)
        strips = [Strip(wanted[n].run, wanted[n].start, slices[n].end) for n in placing.order]
        self._strips = strips
        width = even(max(blocks_for(strip.filled) - strip.start for strip in strips))
        return _Step(
            torch.tensor([rows[n] for n in placing.order]),
            torch.tensor([s.filled - 1 - s.start * BLOCK_TOKENS for s in strips]),
            width * BLOCK_TOKENS,
            plan.decode_mask([slices[n] for n in placing.order], width, window),
            placing.moves,
            [(n, torch.tensor(self._table(strips[n], window))) for n in placing.fills],
        )

    def _table(self, strip: Strip, window: Window) -> list[int]:
        """Blocks for the whole strip: a NaN that its last owner left would be seen, even masked."""
        table = strip.run.tables[window].blocks[strip.start :]
        return table + [TRASH] * (self._capacity - len(table))


class Strips:
    """The strips of the layers of one `window`; `pools`: these layers' blocks."""

    def __init__(self, pools: Mapping[int, KV], window: Window) -> None:
        self._pools, self._window = pools, window
        self._budget = SHARE * next(len(keys) - 1 for keys, _ in pools.values())  # in blocks
        self._shelves: dict[int, _Shelf] = {}
        self._plan: Plan | None = None
        self._steps: list[tuple[_Shelf, _Step]] = []
        self._behind: set[int] = set()  # layers that the current step has not come to

    def clear(self) -> None:
        """Free the memory; strips are made again as they are needed."""
        self._shelves.clear()

    def decode(
        self, layer: int, plan: Plan, query: Tensor, new: KV, scaling: float | None, out: Tensor
    ) -> bool:
        """Attention of a step's decoding rows into `out` `[rows, heads, dim]`, in one layer.

        False where strips for them do not fit; nothing was computed then.
        """
        if plan is not self._plan:
            self._arrange(plan)
        self._behind.discard(layer)
        for shelf, step in self._steps:
            both = zip(shelf.kv[layer], self._pools[layer], new, strict=True)
            keys, values = (step.bring(*each) for each in both)
            rows = query[0].index_select(1, step.rows)
            out.index_copy_(0, step.rows, decode(rows, keys, values, step.mask, scaling))
        return bool(self._steps)

    def _arrange(self, plan: Plan) -> None:
        if self._behind:  # the last step broke off: it is unknown what strips hold
            self._shelves.clear()
        self._plan, self._behind = plan, set(self._pools)
        rows = self._by_capacity(plan)
        fits = self._make({capacity: len(of) for capacity, of in rows.items()})
        shelves = {capacity: self._shelves[capacity] for capacity in rows} if fits else {}
        self._steps = [(s, s.arrange(plan, rows[c], self._window)) for c, s in shelves.items()]

    def _by_capacity(self, plan: Plan) -> dict[int, list[int]]:
        """The decoding rows of a step by the capacity that they need."""
        rows: dict[int, list[int]] = {}
        for row, piece in enumerate(plan.decoding):
            needed = blocks_for(piece.end) - split(piece, self._window)
            rows.setdefault(_capacity(needed), []).append(row)
        return rows

    def _make(self, counts: Mapping[int, int]) -> bool:
        """Have at least so many strips of each capacity; False if they do not fit."""
        kept = {c: s for c, s in self._shelves.items() if s.count >= counts.get(c, 0)}
        needed = {c: 1 << (n - 1).bit_length() for c, n in counts.items() if c not in kept}
        if not needed:
            return True
        if self._size({c: s.count for c, s in kept.items()}) + self._size(needed) > self._budget:
            kept, needed = {}, dict(counts)
        self._shelves = kept
        if self._size(needed) > self._budget:
            return False
        self._shelves |= {c: _Shelf(c, self._memory(c, n)) for c, n in needed.items()}
        return True

    def _size(self, counts: Mapping[int, int]) -> int:
        return sum(capacity * count for capacity, count in counts.items())

    def _memory(self, capacity: int, count: int) -> dict[int, KV]:
        return {
            layer: (_strips(k, capacity, count), _strips(v, capacity, count))
            for layer, (k, v) in self._pools.items()
        }


def _capacity(blocks: int) -> int:
    """Of a strip for so many blocks: it holds as many as attention takes for them, or some more."""
    if blocks <= LEAST_CAPACITY:
        return LEAST_CAPACITY
    splits = -(-blocks // SPLIT_BLOCKS)
    return SPLIT_BLOCKS << (splits - 1).bit_length()


def _strips(blocks: Tensor, capacity: int, count: int) -> Tensor:
    """Memory that is not touched before it is filled."""
    _, tokens, heads, dim = blocks.shape
    return blocks.new_empty((count, heads, capacity * tokens, dim))

"""Steps in which every sequence decodes, as tensors that stay where they are: a graph's input.

A step is padded with rows that each stand for a sequence of one token in the spare block, so that
the padding computes what is defined, and nobody sees it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gpu_worker.engines.device_transfer import to_device
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS, NULL_BLOCK, blocks_for
from gpu_worker.engines.paged.batch.sequence_state import BlockTable, SequenceSlice, SlidingWindow


@dataclass(frozen=True)
class DecodeInputs:
    """`n` rows of one token each: `ids`, `positions` int64 `[n]`, `lengths` int32 `[n]`.

    `tables`: by window the blocks of each row in order of position, int32 `[n, b]`.
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    block_tables: Mapping[SlidingWindow, Tensor]
    _slot_mappings: Mapping[SlidingWindow, Tensor]

    def slot_mapping(self, window: SlidingWindow) -> Tensor:
        """Where each token's KV goes, as an index into the blocks laid end to end."""
        return self._slot_mappings[window]


class DecodeInputBuffers:
    """Holds the input of one step at a time, of at most `rows` sequences of `tokens` each.

    `show` fills it; `step` names what it holds, always the same memory for as many rows.
    """

    def __init__(
        self, windows: Iterable[SlidingWindow], rows: int, tokens: int, device: torch.device
    ) -> None:
        self._device = device
        self._rows = torch.zeros((2, rows), dtype=torch.long, device=device)
        self._tables = {w: _DeviceBlockTables(rows, blocks_for(tokens), device) for w in windows}

    def fill(self, slices: Sequence[SequenceSlice], rows: int) -> None:
        """Put decoding slices into the first of `rows` rows, and padding behind them."""
        padding = [0] * (rows - len(slices))
        ids = [piece.state.tokens[piece.start] for piece in slices]
        positions = [piece.start for piece in slices]
        shown = to_device([ids + padding, positions + padding], torch.long, self._device)
        self._rows[:, :rows] = shown
        for window, tables in self._tables.items():
            held = [piece.state.block_tables[window] for piece in slices]
            tables.fill([*held, *(None for _ in padding)])

    def inputs(self, rows: int) -> DecodeInputs:
        """The first `rows` rows, as they are when this is computed."""
        ids, positions = self._rows[:, :rows]
        tables = {window: tables.blocks[:rows] for window, tables in self._tables.items()}
        slots = {window: _map_slots(table, positions) for window, table in tables.items()}
        return DecodeInputs(ids, positions, (positions + 1).to(torch.int32), tables, slots)


class _DeviceBlockTables:
    """The tables of one window on the device. Only what has changed is sent."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self.blocks = torch.full((rows, blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        self._contents = [_EMPTY_ROW] * rows

    def fill(self, tables: Sequence[BlockTable | None]) -> None:
        """One for each row, from the first on; None: the spare block."""
        edits = [e for row, table in enumerate(tables) for e in self._edits(row, table)]
        if edits:
            edited = to_device(list(zip(*edits, strict=True)), torch.long, self.blocks.device)
            rows, columns, blocks = edited
            self.blocks.index_put_((rows, columns), blocks.to(torch.int32))
        self._contents[: len(tables)] = [_RowContent.from_table(table) for table in tables]

    def _edits(self, row: int, table: BlockTable | None) -> Iterator[tuple[int, int, int]]:
        """Row, column and block of each change; what lies behind a table's end is never read."""
        shown = self._contents[row]
        if table is None:
            if shown.table:
                yield row, 0, NULL_BLOCK
            return
        known = shown.count if shown.table is table else 0
        for column in range(shown.first if known else 0, min(table.first_held, known)):
            yield row, column, NULL_BLOCK
        for column in range(known, len(table.blocks)):
            yield row, column, table.blocks[column]


@dataclass(frozen=True)
class _RowContent:
    """What a row shows: so many blocks of a table, given back up to `first` then."""

    table: BlockTable | None = None
    count: int = 0
    first: int = 0

    @classmethod
    def from_table(cls, table: BlockTable | None) -> Self:
        return cls(table, len(table.blocks), table.first_held) if table else cls()


_EMPTY_ROW = _RowContent()


def _map_slots(table: Tensor, positions: Tensor) -> Tensor:
    blocks = table.gather(1, positions[:, None] // BLOCK_TOKENS)[:, 0].long()
    return blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS

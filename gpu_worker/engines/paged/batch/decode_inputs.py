"""Input tensors of decode-only steps, in buffers that keep their memory, as a CUDA graph needs.

A step is padded with rows that each stand for a sequence of one token in the null block: the
padding computes something defined, and nobody reads the result.
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
    """The input tensors of a decode step: `n` rows of one token each.

    `input_ids` and `positions` are int64 `[n]`. `seq_lens` are the sequences' tokens with this one,
    int32 `[n]`. `block_tables` holds for each window the blocks of each row in order of position,
    int32 `[n, b]`.
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    block_tables: Mapping[SlidingWindow, Tensor]
    _slot_mappings: Mapping[SlidingWindow, Tensor]

    def slot_mapping(self, window: SlidingWindow) -> Tensor:
        """Return the slot in which the KV of each row's token is stored, int64 `[n]`.

        Slots number the tokens of all KV blocks of the window, laid end to end.
        """
        return self._slot_mappings[window]


class DecodeInputBuffers:
    """Buffers on the device for the inputs of one decode step at a time.

    They have room for `rows` sequences of at most `tokens` tokens each. `fill` writes a step, and
    `inputs` returns it as views. The views for a number of rows always have the same memory, as a
    CUDA graph needs.
    """

    def __init__(
        self, windows: Iterable[SlidingWindow], rows: int, tokens: int, device: torch.device
    ) -> None:
        self._device = device
        self._rows = torch.zeros((2, rows), dtype=torch.long, device=device)
        self._tables = {w: _DeviceBlockTables(rows, blocks_for(tokens), device) for w in windows}

    def fill(self, slices: Sequence[SequenceSlice], rows: int) -> None:
        """Write decoding slices to the first rows of the buffers, and padding up to row `rows`.

        A padding row stands for a sequence of one token in the null block. `slices` may be empty.
        """
        padding = [0] * (rows - len(slices))
        ids = [seq_slice.state.tokens[seq_slice.start] for seq_slice in slices]
        positions = [seq_slice.start for seq_slice in slices]
        sent = to_device([ids + padding, positions + padding], torch.long, self._device)
        self._rows[:, :rows] = sent
        for window, tables in self._tables.items():
            held_tables = [seq_slice.state.block_tables[window] for seq_slice in slices]
            tables.fill([*held_tables, *(None for _ in padding)])

    def inputs(self, rows: int) -> DecodeInputs:
        """Return the first `rows` rows of the buffers as the inputs of a step.

        Slots and lengths are computed from the buffers on the device, so a CUDA graph computes them
        anew at each replay.
        """
        ids, positions = self._rows[:, :rows]
        tables = {window: tables.blocks[:rows] for window, tables in self._tables.items()}
        slots = {window: _map_slots(table, positions) for window, table in tables.items()}
        return DecodeInputs(ids, positions, (positions + 1).to(torch.int32), tables, slots)


class _DeviceBlockTables:
    """The block tables of one window on the device. Only changed entries are transferred."""

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self.blocks = torch.full((rows, blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        self._contents = [_EMPTY_ROW] * rows

    def fill(self, tables: Sequence[BlockTable | None]) -> None:
        """Set the tables of the first rows, one each; None stands for the null block."""
        edits = [e for row, table in enumerate(tables) for e in self._edits(row, table)]
        if edits:
            sent = to_device(list(zip(*edits, strict=True)), torch.long, self.blocks.device)
            rows, columns, blocks = sent
            self.blocks.index_put_((rows, columns), blocks.to(torch.int32))
        self._contents[: len(tables)] = [_RowContent.from_table(table) for table in tables]

    def _edits(self, row: int, table: BlockTable | None) -> Iterator[tuple[int, int, int]]:
        """Yield row, column and block of each entry to change.

        Entries behind a table's end stay as they are: they are never read.
        """
        sent = self._contents[row]
        if table is None:
            if sent.table:
                yield row, 0, NULL_BLOCK
            return
        known = sent.count if sent.table is table else 0
        for column in range(sent.first if known else 0, min(table.first_held, known)):
            yield row, column, NULL_BLOCK
        for column in range(known, len(table.blocks)):
            yield row, column, table.blocks[column]


@dataclass(frozen=True)
class _RowContent:
    """The content of a row on the device: the first `count` blocks of a table.

    `first` is the table's `first_held` at the time: blocks before it had been given back.
    """

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

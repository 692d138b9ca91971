"""The KV blocks of all layers, and the attention function that transformers calls in each layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from mmap import mmap

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gpu_worker.engines.device_transfer import to_device
from gpu_worker.engines.paged.attention.contiguous_kv_copies import ContiguousKv
from gpu_worker.engines.paged.attention.kernels.selection import select_kernels
from gpu_worker.engines.paged.attention.sdpa import attend_decode, attend_prefill
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS
from gpu_worker.engines.paged.batch.decode_inputs import DecodeInputs
from gpu_worker.engines.paged.batch.sequence_state import SlidingWindow
from gpu_worker.engines.paged.batch.step_inputs import StepInputs

BUFFER_GROWTH = 1.25  # a gather buffer is made larger than asked, since contexts grow

_numbers = count()


@dataclass(frozen=True)
class KvLayerSpec:
    """The KV of one attention layer on this rank: its KV heads, their size, its sliding window."""

    kv_heads: int
    head_dim: int
    window: SlidingWindow


class PagedAttention:
    """The KV blocks of all layers on one rank, and attention over them.

    `blocks` is the number of blocks of each layer, by the layer's window. transformers calls the
    attention by `name`, under which it is registered. The caller must set `inputs` to the step's
    inputs before each forward pass; to a `DecodeInputs` only if `kernels` has a decode kernel.
    """

    def __init__(
        self,
        layers: list[KvLayerSpec],
        blocks: Mapping[SlidingWindow, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers, self._device = layers, device
        shapes = [(blocks[kv.window] + 1, BLOCK_TOKENS, kv.kv_heads, kv.head_dim) for kv in layers]
        self._keys = [_allocate_zeros(shape, dtype, device) for shape in shapes]
        self._values = [_allocate_zeros(shape, dtype, device) for shape in shapes]
        self._gather_buffers: dict[torch.Size, tuple[Tensor, Tensor]] = {}
        self._contiguous = self._make_contiguous() if device.type == "cpu" else {}
        self.kernels = select_kernels(device, dtype, {layer.head_dim for layer in layers})
        self.inputs: StepInputs | DecodeInputs = StepInputs([], dtype, device)
        self.name = f"millstream_paged_{next(_numbers)}"
        AttentionInterface.register(self.name, self._attend)

    def close(self) -> None:
        """Free the memory of KV, buffers and copies. Attention must not be computed afterwards.

        The name stays registered in transformers.
        """
        self._keys, self._values = [], []
        self._contiguous.clear()
        self._gather_buffers.clear()

    def free_buffers(self) -> None:
        """Free gather buffers and contiguous copies; KV blocks stay.

        Both are made again when attention next needs them.
        """
        self._gather_buffers.clear()
        for contiguous in self._contiguous.values():
            contiguous.clear()

    def _make_contiguous(self) -> dict[SlidingWindow, ContiguousKv]:
        pools = list(zip(self._keys, self._values, strict=True))
        windows = [layer.window for layer in self._layers]
        return {
            window: ContiguousKv(
                {n: pools[n] for n, w in enumerate(windows) if w == window}, window
            )
            for window in set(windows)
        }

    def zero_blocks(self, blocks: Mapping[SlidingWindow, list[int]]) -> None:
        """Set the KV of the given block numbers, by window, to zero in all layers of that window.

        A NaN left in a block would reach the next sequence that reads the block, even where it is
        masked.
        """
        for window, numbers in blocks.items():
            index = to_device(numbers, torch.long, self._device)
            for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
                if layer.window == window:
                    keys.index_fill_(0, index, 0)
                    values.index_fill_(0, index, 0)

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: SlidingWindow = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Store the step's KV and attend: query `[1, heads, rows, dim]` to `[1, rows, heads, dim]`.

        transformers calls it as its attention function.
        """
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = self._keys[layer], self._values[layer]
        slots = self.inputs.slot_mapping(sliding_window)
        keys.flatten(0, 1).index_copy_(0, slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, slots, value[0].transpose(0, 1))
        rows, scale = query[0].transpose(0, 1), scaling or query.shape[3] ** -0.5
        if isinstance(self.inputs, DecodeInputs):
            assert self.kernels.decode, "only a decode kernel computes DecodeInputs"
            visible = self.inputs.block_tables[sliding_window], self.inputs.seq_lens
            decoded = self.kernels.decode(rows, keys, values, *visible, scale, sliding_window)
            return decoded[None], None
        count = query.shape[2]
        out = query.new_zeros(count + 1, *rows.shape[1:])  # padding is written to the last row
        self.kernels.attend(self.inputs, rows, keys, values, out[:count], scale, sliding_window)
        if not self.kernels.decode:
            new_kv = key, value
            self._attend_decode(self.inputs, layer, sliding_window, query, new_kv, scaling, out)
        if not self.kernels.prefill:
            self._attend_prefill(self.inputs, layer, sliding_window, rows, scaling, out)
        return out[None, :count], None

    def _attend_decode(
        self, inputs: StepInputs, layer: int, window: SlidingWindow, query: Tensor,
        new_kv: tuple[Tensor, Tensor], scaling: float | None, out: Tensor,
    ) -> None:  # fmt: skip
        contiguous = self._contiguous.get(window)
        if contiguous and contiguous.attend_decode(layer, inputs, query, new_kv, scaling, out):
            return
        for group in inputs.decode_groups(window):
            target, blocks = slice(group.first, group.last), group.blocks
            k, v = self._gather(layer, blocks.flatten())
            by_row = len(blocks), -1, *k.shape[1:]
            visible = k.view(by_row), v.view(by_row)
            out[target] = attend_decode(query[0, :, target], *visible, group.mask, scaling)

    def _attend_prefill(
        self, inputs: StepInputs, layer: int, window: SlidingWindow, rows: Tensor,
        scaling: float | None, out: Tensor,
    ) -> None:  # fmt: skip
        for group in inputs.prefill_groups(window):
            query = rows.index_select(0, group.query_rows.flatten())
            query = query.view(*group.query_rows.shape, *rows.shape[1:])
            k, v = self._gather(layer, group.blocks.flatten())
            keys, values = (kv.view(len(query), -1, *kv.shape[1:]) for kv in (k, v))
            for tile in group.tiles:
                chunks_of_tile, visible = slice(tile.chunks), slice(tile.mask.shape[3])
                target = chunks_of_tile, slice(tile.first, tile.last)
                mask = tile.mask_for_heads(query.shape[2] // keys.shape[2])
                attended = attend_prefill(
                    query[target],
                    keys[chunks_of_tile, visible],
                    values[chunks_of_tile, visible],
                    mask,
                    scaling,
                )
                out.index_copy_(0, group.output_rows[target].flatten(), attended.flatten(0, 1))

    def _gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values `[tokens, kv_heads, dim]` of blocks; valid until the next call.

        Buffers are reused because fresh ones of this size fault in page by page, in every layer.
        """
        keys, values = self._keys[layer], self._values[layer]
        size, block = len(blocks), keys.shape[1:]
        if block not in self._gather_buffers or len(self._gather_buffers[block][0]) < size:
            shape = (int(size * BUFFER_GROWTH) + 64, *block)
            self._gather_buffers[block] = (keys.new_empty(shape), keys.new_empty(shape))
        into_keys, into_values = self._gather_buffers[block]
        torch.index_select(keys, 0, blocks, out=into_keys[:size])
        torch.index_select(values, 0, blocks, out=into_values[:size])
        return into_keys[:size].flatten(0, 1), into_values[:size].flatten(0, 1)


def _allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on a CPU by `mmap`, whose memory goes back to the system when it is freed.

    Memory from the heap would not. The zeros are written at once: the first touch of a page takes
    longer than writing KV to it, and would otherwise come in the middle of a prompt.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape).zero_()

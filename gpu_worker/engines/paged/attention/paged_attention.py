"""The attention function that transformers calls in each layer, over paged KV."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from mmap import mmap

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gpu_worker.engines.device_transfer import to_device
from gpu_worker.engines.paged.attention.contiguous_kv import ContiguousKv
from gpu_worker.engines.paged.attention.kernels.selection import select_kernels
from gpu_worker.engines.paged.attention.sdpa import attend_decode, attend_prefill
from gpu_worker.engines.paged.batch.block_pool import BLOCK_TOKENS
from gpu_worker.engines.paged.batch.decode_inputs import DecodeInputs
from gpu_worker.engines.paged.batch.sequence_state import SlidingWindow
from gpu_worker.engines.paged.batch.step_inputs import StepInputs

BUFFER_GROWTH = 1.25  # gather buffers grow by steps, as contexts do

_numbers = count()


@dataclass(frozen=True)
class KvLayerSpec:
    """The KV of one attention layer."""

    kv_heads: int
    head_dim: int
    window: SlidingWindow


class PagedAttention:
    """KV blocks of every layer, and attention over them for the current `plan`.

    `blocks`: how many there are for the layers of each window. transformers finds it by `name`.
    Set `plan` before each forward pass; a `DecodeInputs` only where `kernels` decode.
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
        """Free the memory; the name stays taken and answers no more."""
        self._keys, self._values = [], []
        self._contiguous.clear()
        self._gather_buffers.clear()

    def free_buffers(self) -> None:
        """Free what is kept for speed alone."""
        self._gather_buffers.clear()
        for strips in self._contiguous.values():
            strips.clear()

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
        """Clear blocks: even masked, a NaN left in one would reach who reads it next."""
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
        """Query `[1, heads, tokens, dim]` to output `[1, tokens, heads, dim]`; keeps the KV."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = self._keys[layer], self._values[layer]
        slots = self.inputs.slot_mapping(sliding_window)
        keys.flatten(0, 1).index_copy_(0, slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, slots, value[0].transpose(0, 1))
        rows, scale = query[0].transpose(0, 1), scaling or query.shape[3] ** -0.5
        if isinstance(self.inputs, DecodeInputs):
            assert self.kernels.decode, "only a kernel computes a DecodeStep"
            seen = self.inputs.block_tables[sliding_window], self.inputs.seq_lens
            decoded = self.kernels.decode(rows, keys, values, *seen, scale, sliding_window)
            return decoded[None], None
        count = query.shape[2]
        out = query.new_zeros(count + 1, *rows.shape[1:])  # padding is written to the last row
        self.kernels.attend(self.inputs, rows, keys, values, out[:count], scale, sliding_window)
        if not self.kernels.decode:
            kept = key, value
            self._attend_decode(self.inputs, layer, sliding_window, query, kept, scaling, out)
        if not self.kernels.prefill:
            self._attend_prefill(self.inputs, layer, sliding_window, rows, scaling, out)
        return out[None, :count], None

    def _attend_decode(
        self, plan: StepInputs, layer: int, window: SlidingWindow, query: Tensor,
        kept: tuple[Tensor, Tensor], scaling: float | None, out: Tensor,
    ) -> None:  # fmt: skip
        strips = self._contiguous.get(window)
        if strips and strips.attend_decode(layer, plan, query, kept, scaling, out):
            return
        for decodes in plan.decode_groups(window):
            at, blocks = slice(decodes.first, decodes.last), decodes.blocks
            k, v = self._gather(layer, blocks.flatten())
            by_row = len(blocks), -1, *k.shape[1:]
            seen = k.view(by_row), v.view(by_row)
            out[at] = attend_decode(query[0, :, at], *seen, decodes.mask, scaling)

    def _attend_prefill(
        self, plan: StepInputs, layer: int, window: SlidingWindow, rows: Tensor,
        scaling: float | None, out: Tensor,
    ) -> None:  # fmt: skip
        for chunks in plan.prefill_groups(window):
            query = rows.index_select(0, chunks.reads.flatten())
            query = query.view(*chunks.reads.shape, *rows.shape[1:])
            k, v = self._gather(layer, chunks.blocks.flatten())
            keys, values = (kv.view(len(query), -1, *kv.shape[1:]) for kv in (k, v))
            for tile in chunks.tiles:
                of, seen = slice(tile.chunks), slice(tile.mask.shape[3])
                at = of, slice(tile.first, tile.last)
                mask = tile.mask_for_heads(query.shape[2] // keys.shape[2])
                made = attend_prefill(query[at], keys[of, seen], values[of, seen], mask, scaling)
                out.index_copy_(0, chunks.writes[at].flatten(), made.flatten(0, 1))

    def _gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies `[tokens, kv_heads, dim]` of some blocks, valid until the next call.

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
    """Zeros which, on a CPU, take no memory after they are freed, as those from the heap would.

    Written here: the first touch of a page takes longer than writing KV to it, and it would come
    in the middle of a prompt.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape).zero_()

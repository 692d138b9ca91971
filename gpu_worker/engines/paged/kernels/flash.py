"""FlashAttention as torch has it: `torch.nn.attention.varlen`, over packed sequences.

Only FlashAttention 3 (compute capability 9.0, package `flash_attn_interface`, torch 2.12) takes a
table of blocks; the one inside torch takes keys and values end to end, so they are gathered first.
"""

from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as torch_attention

from gpu_worker.engines.paged.kernels.packed import Packed
from gpu_worker.engines.paged.run import Window

# Its parameters became more from release to release: what is there is asked of the function.
varlen_attn: Any = import_module("torch.nn.attention.varlen").varlen_attn  # torch 2.10
_KNOWN = frozenset(signature(varlen_attn).parameters)

LEAST_CAPABILITY = (8, 0)
PAGED_CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)
MOST_DIM, DIM_STEP = 256, 8


def takes(capability: tuple[int, int], dtype: torch.dtype, dims: set[int]) -> bool:
    """Whether torch's own FlashAttention can compute layers of such heads on such a device."""
    fits = all(dim <= MOST_DIM and dim % DIM_STEP == 0 for dim in dims)
    return "window_size" in _KNOWN and capability >= LEAST_CAPABILITY and dtype in DTYPES and fits


def takes_blocks(capability: tuple[int, int]) -> bool:
    """Whether FlashAttention 3 is there; torch then uses it everywhere in this process."""
    there = find_spec("flash_attn_interface") is not None
    if not (there and "block_table" in _KNOWN and capability == PAGED_CAPABILITY):
        return False
    torch_attention.activate_flash_attention_impl("FA3")
    return True


def over_gathered(
    query: Tensor, keys: Tensor, values: Tensor, packed: Packed, scale: float, window: Window
) -> Tensor:
    """Rows `[rows, heads, dim]` of `packed` to their output of the same shape.

    `keys` and `values` as in `split_decode`.
    """
    return _varlen(
        query, keys.flatten(0, 1)[packed.seen], values.flatten(0, 1)[packed.seen],
        packed.starts, packed.seen_starts, packed.most_rows, packed.most_seen,
        scale=scale, window_size=_window(window),
    )  # fmt: skip


def over_blocks(
    query: Tensor, keys: Tensor, values: Tensor, packed: Packed, scale: float, window: Window
) -> Tensor:
    """As `over_gathered`, reading the blocks where they are."""
    return _varlen(
        query, keys, values, packed.starts, None, packed.most_rows, packed.most_tokens,
        scale=scale, window_size=_window(window),
        seqused_k=packed.lengths, block_table=packed.table,
    )  # fmt: skip


def decode_over_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: Window = None,
) -> Tensor:
    """As `split_decode`; a row of length 0 is not defined."""
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device)
    return _varlen(
        query, keys, values, starts, None, 1, table.shape[1] * keys.shape[1],
        scale=scale, window_size=_window(window), seqused_k=lengths, block_table=table,
    )  # fmt: skip


def _varlen(*tensors: object, **options: object) -> Tensor:
    grouped = {"enable_gqa": True} if "enable_gqa" in _KNOWN else {}  # else it goes without saying
    out: Tensor = varlen_attn(*tensors, **options, **grouped)
    return out


def _window(window: Window) -> tuple[int, int]:
    """Tokens to the left beside one's own, and to the right."""
    return (-1 if window is None else window - 1, 0)

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

from gpu_worker.engines.paged.batch.sequence_state import SlidingWindow
from gpu_worker.engines.paged.batch.varlen_batch import VarlenBatch

# Its parameters became more from release to release: what is there is asked of the function.
varlen_attn: Any = import_module("torch.nn.attention.varlen").varlen_attn  # torch 2.10
_PARAMETERS = frozenset(signature(varlen_attn).parameters)

MIN_CAPABILITY = (8, 0)
PAGED_CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8


def is_supported(capability: tuple[int, int], dtype: torch.dtype, dims: set[int]) -> bool:
    """Whether torch's own FlashAttention can compute layers of such heads on such a device."""
    fits = all(dim <= MAX_HEAD_DIM and dim % HEAD_DIM_MULTIPLE == 0 for dim in dims)
    return (
        "window_size" in _PARAMETERS and capability >= MIN_CAPABILITY and dtype in DTYPES and fits
    )


def activate_flash_attention_3(capability: tuple[int, int]) -> bool:
    """Whether FlashAttention 3 is there; torch then uses it everywhere in this process."""
    there = find_spec("flash_attn_interface") is not None
    if not (there and "block_table" in _PARAMETERS and capability == PAGED_CAPABILITY):
        return False
    torch_attention.activate_flash_attention_impl("FA3")
    return True


def attend_gathered(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: VarlenBatch,
    scale: float,
    window: SlidingWindow,
) -> Tensor:
    """Rows `[rows, heads, dim]` of `packed` to their output of the same shape.

    `keys` and `values` as in `split_decode`.
    """
    return _call_varlen_attn(
        query, keys.flatten(0, 1)[packed.visible_slots], values.flatten(0, 1)[packed.visible_slots],
        packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k,
        scale=scale, window_size=_window_size(window),
    )  # fmt: skip


def attend_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: VarlenBatch,
    scale: float,
    window: SlidingWindow,
) -> Tensor:
    """As `over_gathered`, reading the blocks where they are."""
    return _call_varlen_attn(
        query, keys, values, packed.cu_seqlens_q, None, packed.max_seqlen_q, packed.max_seq_len,
        scale=scale, window_size=_window_size(window),
        seqused_k=packed.seq_lens, block_table=packed.block_table,
    )  # fmt: skip


def decode_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: SlidingWindow = None,
) -> Tensor:
    """As `split_decode`; a row of length 0 is not defined."""
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=query.device)
    return _call_varlen_attn(
        query, keys, values, starts, None, 1, table.shape[1] * keys.shape[1],
        scale=scale, window_size=_window_size(window), seqused_k=lengths, block_table=table,
    )  # fmt: skip


def _call_varlen_attn(*tensors: object, **options: object) -> Tensor:
    grouped = (
        {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}
    )  # else it goes without saying
    out: Tensor = varlen_attn(*tensors, **options, **grouped)
    return out


def _window_size(window: SlidingWindow) -> tuple[int, int]:
    """Tokens to the left beside one's own, and to the right."""
    return (-1 if window is None else window - 1, 0)

"""FlashAttention by way of torch (`torch.nn.attention.varlen`), over sequences end to end.

Only FlashAttention 3 (compute capability 9.0, package `flash_attn_interface`, torch 2.12) takes a
block table; the version inside torch takes keys and values end to end, so they are gathered first.
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

# Each torch release added parameters to it, so its signature tells which ones there are.
varlen_attn: Any = import_module("torch.nn.attention.varlen").varlen_attn  # torch 2.10
_PARAMETERS = frozenset(signature(varlen_attn).parameters)

MIN_CAPABILITY = (8, 0)
PAGED_CAPABILITY = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 256, 8


def is_supported(capability: tuple[int, int], dtype: torch.dtype, dims: set[int]) -> bool:
    """Return whether the FlashAttention inside torch can run for this GPU, type and head sizes.

    It needs compute capability 8.0, float16 or bfloat16, head sizes `dims` that are multiples of 8
    up to 256, and a torch whose function takes `window_size`.
    """
    heads_fit = all(dim <= MAX_HEAD_DIM and dim % HEAD_DIM_MULTIPLE == 0 for dim in dims)
    return (
        "window_size" in _PARAMETERS
        and capability >= MIN_CAPABILITY
        and dtype in DTYPES
        and heads_fit
    )


def activate_flash_attention_3(capability: tuple[int, int]) -> bool:
    """Make torch use FlashAttention 3 in this whole process, and return True, if it is available.

    Otherwise return False and change nothing. It is available at compute capability 9.0, with the
    package `flash_attn_interface` and a torch whose function takes `block_table`.
    """
    is_installed = find_spec("flash_attn_interface") is not None
    if not (is_installed and "block_table" in _PARAMETERS and capability == PAGED_CAPABILITY):
        return False
    torch_attention.activate_flash_attention_impl("FA3")
    return True


def attend_gathered(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: VarlenBatch,
    scale: float,
    window: SlidingWindow,
) -> Tensor:
    """Compute attention for the rows of a varlen batch, after gathering their KV from its blocks.

    `query` is `[rows, heads, dim]`, and the output has the same shape. `keys` and `values` are KV
    blocks, and `window` limits what a row attends to, as in `split_decode`.
    """
    return _call_varlen_attn(
        query, keys.flatten(0, 1)[batch.visible_slots], values.flatten(0, 1)[batch.visible_slots],
        batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k,
        scale=scale, window_size=_window_size(window),
    )  # fmt: skip


def attend_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: VarlenBatch,
    scale: float,
    window: SlidingWindow,
) -> Tensor:
    """Compute the same as `attend_gathered`, but read KV blocks where they lie.

    Needs FlashAttention 3; see `activate_flash_attention_3`.
    """
    return _call_varlen_attn(
        query, keys, values, batch.cu_seqlens_q, None, batch.max_seqlen_q, batch.max_seq_len,
        scale=scale, window_size=_window_size(window),
        seqused_k=batch.seq_lens, block_table=batch.block_table,
    )  # fmt: skip


def decode_paged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: SlidingWindow = None,
) -> Tensor:
    """Compute the same as `split_decode`, except that the output of a row of length 0 is undefined.

    Needs FlashAttention 3; see `activate_flash_attention_3`.
    """
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=query.device)
    return _call_varlen_attn(
        query, keys, values, starts, None, 1, block_table.shape[1] * keys.shape[1],
        scale=scale, window_size=_window_size(window), seqused_k=seq_lens, block_table=block_table,
    )  # fmt: skip


def _call_varlen_attn(*tensors: object, **options: object) -> Tensor:
    # Without the parameter, grouped queries are always allowed.
    gqa_option = {"enable_gqa": True} if "enable_gqa" in _PARAMETERS else {}
    out: Tensor = varlen_attn(*tensors, **options, **gqa_option)
    return out


def _window_size(window: SlidingWindow) -> tuple[int, int]:
    """Return how many tokens to the left and right of its own a query attends to; -1: all."""
    return (-1 if window is None else window - 1, 0)

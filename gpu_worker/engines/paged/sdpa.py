"""Scaled dot-product attention over whole blocks of KV, in shapes that round alike.

Query heads that share a KV head are packed as its rows, or share it by strides: KV is not repeated.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from gpu_worker.engines.paged.plan import TILE_ROWS


def decode(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """One token each: query `[heads, n, dim]`, KV `[n, tokens, kv_heads, dim]`.

    To `[n, heads, dim]`.
    """
    (heads, count, dim), kv_heads = query.shape, keys.shape[2]
    packed = query.transpose(0, 1).reshape(count, kv_heads, -1, dim)
    shared = packed.shape[2]
    if keys.dtype != torch.float32:  # where rounding does not matter, two rows take 0.7 of the time
        packed = pad(packed, (0, 0, 0, -shared % TILE_ROWS))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    out = scaled_dot_product_attention(packed, keys, values, mask, scale=scaling)
    return out[:, :, :shared].reshape(count, heads, dim)


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Rows of `n` runs: query `[n, rows, heads, dim]`, KV `[n, tokens, kv_heads, dim]`.

    To `[n, rows, heads, dim]`. Heads that share a KV head do so by a stride of zero. That leaves
    one dimension for the batch: runs or KV heads, whichever are more; the others take turns.
    """
    kv_heads = keys.shape[2]
    turns = 0 if len(query) < kv_heads else 1
    n, rows, _, dim = query.shape
    query = query.reshape(n, rows, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    shared = (-1, -1, query.shape[2], -1, -1)
    keys = keys.transpose(1, 2)[:, :, None].expand(shared)
    values = values.transpose(1, 2)[:, :, None].expand(shared)
    each = zip(query.unbind(turns), keys.unbind(turns), values.unbind(turns), strict=True)
    made = [scaled_dot_product_attention(*one, mask, scale=scaling) for one in each]
    return torch.stack(made, turns).permute(0, 3, 1, 2, 4).flatten(2, 3)

"""Torch's scaled dot-product attention over whole KV blocks, in shapes that round alike.

Query heads that share a KV head are packed as its rows, so that KV is not repeated.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from gpu_worker.engines.paged.batch.step_inputs import TILE_ROWS


def attend_decode(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Return the attention output of one token of each of `n` sequences, `[n, heads, dim]`.

    `query` is `[heads, n, dim]`, `keys` and `values` are `[n, tokens, kv_heads, dim]`, and `mask`
    `[n, 1, 1, tokens]` is added to the scores. `scaling` None is 1/√dim.
    """
    (heads, count, dim), kv_heads = query.shape, keys.shape[2]
    packed = query.transpose(0, 1).reshape(count, kv_heads, -1, dim)
    shared = packed.shape[2]
    # In float32 rounding does not matter, and two rows take 0.7 of the time.
    if keys.dtype != torch.float32:
        packed = pad(packed, (0, 0, 0, -shared % TILE_ROWS))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    out = scaled_dot_product_attention(packed, keys, values, mask, scale=scaling)
    return out[:, :, :shared].reshape(count, heads, dim)


def attend_prefill(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Return the attention output of `rows` tokens of `n` sequences, `[n, rows, heads, dim]`.

    `query` is `[n, rows, heads, dim]`, `keys` and `values` are `[n, tokens, kv_heads, dim]`. The
    mask is added to the scores and has the rows of all heads that share a KV head, one head after
    the other: `[1, 1, rows * heads / kv_heads, tokens]`. `scaling` None is 1/√dim. torch's kernel
    takes a head's queries 64 at a time if there are 192 or more, else 32; so packed heads take 0.8
    of the time.
    """
    n, rows, heads, dim = query.shape
    kv_heads, shared = keys.shape[2], heads // keys.shape[2]
    packed = query.view(n, rows, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(n, kv_heads, shared * rows, dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    out = scaled_dot_product_attention(packed, keys, values, mask, scale=scaling)
    return out.view(n, kv_heads, shared, rows, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)

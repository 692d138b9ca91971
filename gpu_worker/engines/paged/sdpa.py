"""Scaled dot-product attention over whole blocks of KV, in shapes that round alike.

Query heads that share a KV head are packed as its rows, or share it by strides: KV is not repeated.
"""

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
    packed = pad(packed, (0, 0, 0, -shared % TILE_ROWS))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    out = scaled_dot_product_attention(packed, keys, values, mask, scale=scaling)
    return out[:, :, :shared].reshape(count, heads, dim)


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Rows of one run: query `[heads, rows, dim]`, KV `[tokens, kv_heads, dim]`.

    To `[rows, heads, dim]`. KV heads stand where a batch would, so that the heads that share one
    can do so by a stride of zero.
    """
    rows, kv_heads = query.shape[1], keys.shape[1]
    query = pad(query, (0, 0, 0, mask.shape[2] - rows))
    query = query.view(kv_heads, -1, *query.shape[1:])
    shared = (-1, query.shape[1], -1, -1)
    keys = keys.transpose(0, 1)[:, None].expand(shared)
    values = values.transpose(0, 1)[:, None].expand(shared)
    out = scaled_dot_product_attention(query, keys, values, mask, scale=scaling)
    return out.flatten(0, 1)[:, :rows].transpose(0, 1)

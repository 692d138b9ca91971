"""Decode attention over paged KV in Triton: reads blocks where they lie, long contexts in splits.

Flash-decoding (https://pytorch.org/blog/flash-decoding/): each program takes one split of one
sequence's KV for the query heads that share a KV head, with a running softmax in float32; a second
kernel merges the splits. How a sequence is split depends on its own length alone, so its result has
the same bits alone and in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLITS = 32  # splits of one sequence: enough programs to fill a GPU at a batch of one
TILE_BYTES = 1 << 14  # bytes of keys, and again of values, that a program loads at a time
MAX_TILE, MIN_TILE = 64, 16  # tokens of a tile
MIN_ROWS = 16  # rows of a matrix product on a GPU's matrix units, at least


def split_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    splits: int = SPLITS,
) -> Tensor:
    """Return the attention output of one query token per sequence, in the shape of `query`.

    `query` is `[n, heads, dim]`. `keys` and `values` are KV blocks
    `[blocks, tokens, kv_heads, dim]`, contiguous, of the query's type. `block_table` `[n, b]` holds
    each sequence's blocks in order of position, and `seq_lens` `[n]` its number of tokens, the
    query's own included; both are int32. A query attends to all of these tokens, or to the last
    `window`, and no other KV is read. A row of length 0 gives zeros. `scale` multiplies the scores.
    `splits`, a power of two, is into how many parts a sequence is split. Does not wait for the
    device.
    """
    count, heads, dim = query.shape
    _, block_tokens, kv_heads, _ = keys.shape
    query = query.contiguous()
    wide = triton.next_power_of_2(dim)
    partial = torch.empty((count, heads, splits, dim), dtype=torch.float32, device=query.device)
    weights = torch.empty((count, heads, splits), dtype=torch.float32, device=query.device)
    _attend_split[(count, kv_heads, splits)](
        query, keys, values, block_table, seq_lens, partial, weights,
        scale * 1.4426950408889634,  # logarithms of base two from here on: exp2 is one instruction
        window or 0, block_table.stride(0), kv_heads,
        group=heads // kv_heads,
        rows=max(MIN_ROWS, triton.next_power_of_2(heads // kv_heads)),
        dim=dim, wide=wide, block_tokens=block_tokens, splits=splits,
        tile=tile_tokens(wide, query.element_size()),
    )  # fmt: skip
    out = torch.empty_like(query)
    _merge_splits[(count * heads,)](partial, weights, out, dim=dim, wide=wide, splits=splits)
    return out


def tile_tokens(dim: int, item_bytes: int) -> int:
    """Return how many tokens a Triton program loads at a time, between 16 and 64.

    They are fewer for larger heads, because keys and values must fit a GPU's fast memory. `dim` is
    the head size and `item_bytes` the size of one number.
    """
    return min(MAX_TILE, max(MIN_TILE, TILE_BYTES // (dim * item_bytes)))


# Unspecialised: Triton would compile it anew for some values, for a second in the middle of a step.
@triton.jit(do_not_specialize=["window", "table_row", "kv_heads"])
def _attend_split(
    query, keys, values, block_table, seq_lens, partial, weights,
    scale, window, table_row, kv_heads,
    group: tl.constexpr, rows: tl.constexpr, dim: tl.constexpr, wide: tl.constexpr,
    block_tokens: tl.constexpr, splits: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute one split's output, normalised, and the logarithm (base two) of its weight."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + row)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    first_tile = first // tile
    last_tile = tl.cdiv(length, tile)
    each = tl.cdiv(last_tile - first_tile, splits)
    begin = first_tile + split * each
    end = tl.minimum(begin + each, last_tile)

    head = tl.arange(0, rows)
    column = tl.arange(0, wide)
    heads = row * kv_heads * group + kv_head * group + head
    asks = (head < group)[:, None] & (column < dim)[None, :]
    q = tl.load(query + heads[:, None] * dim + column[None, :], mask=asks, other=0.0)
    highest = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, wide), tl.float32)
    for index in range(begin, end):
        position = index * tile + tl.arange(0, tile)
        seen = (position >= first) & (position < length)
        block = tl.load(
            block_table + row * table_row + position // block_tokens, mask=seen, other=0
        )
        slot = block.to(tl.int64) * block_tokens + position % block_tokens
        at = (slot * kv_heads + kv_head)[:, None] * dim + column[None, :]
        held = seen[:, None] & (column < dim)[None, :]
        k = tl.load(keys + at, mask=held, other=0.0)
        v = tl.load(values + at, mask=held, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))  # finite: each tile has a visible token
        shrunk = tl.exp2(highest - higher)
        share = tl.exp2(scores - higher[:, None])
        total = total * shrunk + tl.sum(share, 1)
        added = tl.dot(share.to(v.dtype), v, input_precision="ieee")
        sums = sums * shrunk[:, None] + added
        highest = higher
    place = heads * splits + split
    if begin < end:
        tl.store(weights + place, highest + tl.log2(total), mask=head < group)
        tl.store(partial + place[:, None] * dim + column[None, :], sums / total[:, None], mask=asks)
    else:
        tl.store(weights + place, highest, mask=head < group)


@triton.jit
def _merge_splits(
    partial, weights, out, dim: tl.constexpr, wide: tl.constexpr, splits: tl.constexpr
):  # fmt: skip
    """Merge the splits of one head by their weights; zeros for a sequence without tokens."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, splits)
    column = tl.arange(0, wide)
    weight = tl.load(weights + head * splits + split)
    share = tl.exp2(weight - tl.maximum(tl.max(weight, 0), -1e30))
    held = (weight > float("-inf"))[:, None] & (column < dim)[None, :]
    at = (head * splits + split)[:, None] * dim + column[None, :]
    parts = tl.load(partial + at, mask=held, other=0.0)
    total = tl.sum(share, 0)
    joined = tl.sum(parts * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * dim + column, joined.to(out.dtype.element_ty), mask=column < dim)

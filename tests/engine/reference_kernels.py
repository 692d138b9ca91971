"""What attention kernels are held against: plain PyTorch, sequence by sequence."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_worker.engines.paged.batch.sequence_state import SlidingWindow


def decode(
    query: Tensor, keys: Tensor, values: Tensor,
    block_table: Tensor, seq_lens: Tensor, scale: float, window: SlidingWindow = None,
) -> Tensor:  # fmt: skip
    """The contract of `split_decode`, in float32."""
    out = torch.zeros_like(query)
    for row, length in enumerate(seq_lens.tolist()):
        if length:
            first = max(0, length - window) if window else 0
            k, v = (
                kv[block_table[row].long()].flatten(0, 1)[first:length] for kv in (keys, values)
            )
            out[row] = _attend(query[row, None], k, v, None, scale)[0]
    return out


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor,
    cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As torch documents its own (`torch.nn.attention.varlen`); the newest tokens ask."""
    out = torch.full_like(query, torch.nan)
    starts = _int32(cu_seq_q)
    for row, (start, stop) in enumerate(pairwise(starts)):
        if block_table is None:
            ends = _int32(cu_seq_k)
            seen = [kv[ends[row] : ends[row + 1]] for kv in (key, value)]
        else:
            length, blocks = _int32(seqused_k)[row], torch.tensor(_int32(block_table)[row])
            seen = [kv[blocks].flatten(0, 1)[:length] for kv in (key, value)]
        count, length = stop - start, len(seen[0])
        assert 0 < count <= max_q
        assert count <= length <= max_k
        behind = torch.arange(length - count, length)[:, None] - torch.arange(length)
        keep = behind >= -window_size[1]
        if window_size[0] >= 0:
            keep &= behind <= window_size[0]
        out[start:stop] = _attend(query[start:stop], seen[0], seen[1], keep, scale)
    return out


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, keep: Tensor | None, scale: float
) -> Tensor:
    """`[rows, heads, dim]` over `[tokens, kv_heads, dim]`."""
    q, k, v = (t.float().transpose(0, 1)[None] for t in (query, keys, values))
    out = scaled_dot_product_attention(q, k, v, keep, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).to(query.dtype)


def _int32(tensor: Tensor | None) -> list[int]:
    assert tensor is not None
    assert tensor.dtype == torch.int32
    numbers: list[int] = tensor.tolist()
    return numbers

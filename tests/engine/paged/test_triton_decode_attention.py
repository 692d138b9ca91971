"""The Triton kernel computes what plain PyTorch does, interpreted where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine import reference_kernels

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from gpu_worker.engines.paged.attention.kernels.triton_decode_attention import SPLITS, split_decode  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BLOCK, POOL = 16, 64


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        _widen_bfloat16(monkeypatch)


def _widen_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 as bits, and multiplies the bits (3.7)."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    triton = pytest.importorskip("triton")
    builder, numpy = interpreter.InterpreterBuilder, pytest.importorskip("numpy")
    original = builder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != triton.language.bfloat16:
            return handle
        data = (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(data, triton.language.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, wide(a), wide(b), *rest)

    monkeypatch.setattr(builder, "create_dot", dot)


def _compare(
    lengths: list[int], kv_heads: int, group: int, dim: int,
    dtype: torch.dtype, window: int | None, splits: int,
) -> None:  # fmt: skip
    """One call over shuffled blocks; what a sequence must not see is not a number."""
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    shape = (2, POOL, BLOCK, kv_heads, dim)
    keys, values = torch.randn(shape, generator=generator).to(dtype)
    query = torch.randn((len(lengths), kv_heads * group, dim), generator=generator).to(dtype)
    order = torch.randperm(POOL, generator=generator).to(torch.int32)
    width = max(1, -(-max(lengths) // BLOCK))
    table = torch.stack(
        [order[(row * width + torch.arange(width)) % POOL] for row in range(len(lengths))]
    )
    seen = torch.tensor(lengths, dtype=torch.int32)
    want = reference_kernels.decode(query, keys, values, table, seen, 0.3, window)
    _poison(keys, values, table, lengths, window)
    q, k, v, blocks, ends = (t.to(DEVICE) for t in (query, keys, values, table, seen))
    out = split_decode(q, k, v, blocks, ends, 0.3, window, splits).cpu()
    assert (out.float() - want.float()).abs().max() <= TOLERANCE[dtype]


def _poison(
    keys: Tensor, values: Tensor, table: Tensor, lengths: list[int], window: int | None
) -> None:
    used = torch.zeros(POOL * BLOCK, dtype=torch.bool)
    for row, length in enumerate(lengths):
        places = (table[row].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        used[places[max(0, length - (window or length)) : length]] = True
    for kv in (keys, values):
        kv.flatten(0, 1)[~used] = torch.nan


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("window", [None, 20])
def test_query_heads_share_keys(group: int, window: int | None) -> None:
    """Rows of length 0 are empty places of a padded batch."""
    _compare([1, 0, 17, 130], 2, group, 32, torch.float32, window, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_types_of_half_precision(dtype: torch.dtype, window: int | None) -> None:
    """Sums are float32: the result is as near as the type can be."""
    _compare([1, 0, 17, 130], 1, 4, 32, dtype, window, 4)


@pytest.mark.parametrize("dim", [24, 80, 256])
def test_sizes_of_heads(dim: int) -> None:
    """Also those that are no power of two."""
    _compare([5, 70], 1, 2, dim, torch.float32, None, 2)


@settings(max_examples=6)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 220)),
    st.sampled_from([1, 2, 8]),
)
def test_any_lengths_windows_and_splits(
    lengths: list[int], window: int | None, splits: int
) -> None:
    """However a context is cut, the parts make the whole, and nothing else is read."""
    _compare(lengths, 1, 2, 16, torch.float32, window, splits)


def test_a_sequence_is_computed_alike_in_any_company() -> None:
    """Bit for bit: its splits depend on its own length, not on the longest or on how many."""
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn((2, POOL, BLOCK, 2, 32), generator=generator).to(DEVICE)
    query = torch.randn((3, 4, 32), generator=generator).to(DEVICE)
    table = torch.randperm(POOL, generator=generator)[:60].view(3, 20).to(DEVICE, torch.int32)
    lengths = torch.tensor([33, 300, 90], dtype=torch.int32, device=DEVICE)
    together = split_decode(query, keys, values, table, lengths, 0.2, splits=4)
    for row in range(3):
        one = slice(row, row + 1)
        width = -(-int(lengths[row]) // BLOCK)
        alone = split_decode(
            query[one], keys, values, table[one, :width], lengths[one], 0.2, splits=4
        )
        assert torch.equal(alone[0], together[row])


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gpu_worker.engines.paged.attention.kernels import triton_decode_attention as kernels

POINTERS = {"query": 1, "keys": 1, "values": 1, "block_table": "*i32", "seq_lens": "*i32",
            "partial": "*fp32", "weights": "*fp32"}
NUMBERS = {"scale": "fp32", "window": "i32", "table_row": "i32", "kv_heads": "i32"}

def build(kernel, signature, constants, capability):
    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 99 << 10, compiled.metadata.shared

CASES = (80, "bf16", 2, 128), (90, "bf16", 2, 256), (90, "fp32", 4, 128)
for capability, kind, bytes, dim in CASES:
    split = {"dim": dim, "wide": dim, "splits": kernels.SPLITS}
    pointers = {name: "*" + kind if given == 1 else given for name, given in POINTERS.items()}
    tile = {"tile": kernels.tile_tokens(dim, bytes), "block_tokens": 16, "group": 4, "rows": 16}
    build(kernels._attend_split, pointers | NUMBERS, split | tile, capability)
    joined = {"partial": "*fp32", "weights": "*fp32", "out": "*" + kind}
    build(kernels._merge_splits, joined, split, capability)
"""


def test_it_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """Down to machine code, and with no more shared memory than the smallest of them has."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert SPLITS > 1

"""Chooses the attention kernels: the best that device, installed packages and type allow."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import structlog
import torch
from torch import Tensor

from gpu_worker.engines.paged.attention.kernels import flash_attention
from gpu_worker.engines.paged.batch.sequence_state import SlidingWindow
from gpu_worker.engines.paged.batch.step_inputs import StepInputs
from gpu_worker.engines.paged.batch.varlen_batch import VarlenBatch

log = structlog.get_logger()


class DecodeKernel(Protocol):
    """A kernel for one query token per sequence; the contract is that of `split_decode`."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor,
        block_table: Tensor, seq_lens: Tensor, scale: float, window: SlidingWindow = None,
    ) -> Tensor: ...  # fmt: skip


class PrefillKernel(Protocol):
    """A kernel for many query tokens per sequence; the contract is that of `attend_gathered`."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor,
        batch: VarlenBatch, scale: float, window: SlidingWindow,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class AttentionKernels:
    """The attention kernels for a step's decoding rows and for its prompt chunks.

    None stands for no kernel: the caller gathers KV blocks and uses torch's SDPA.
    """

    decode: DecodeKernel | None = None
    prefill: PrefillKernel | None = None

    def attend(
        self, inputs: StepInputs, query: Tensor, keys: Tensor, values: Tensor,
        out: Tensor, scale: float, window: SlidingWindow,
    ) -> None:  # fmt: skip
        """Compute attention for the rows that have a kernel, into `out` `[rows, heads, dim]`.

        Rows of `out` without a kernel are left as they are. `query` has the shape of `out`; `keys`
        and `values` are KV blocks, as in `split_decode`.
        """
        if self.decode and (batch := inputs.varlen_batch(window, decoding=True)):
            kv_index = batch.block_table, batch.seq_lens
            out[batch.step_rows] = self.decode(
                query[batch.step_rows], keys, values, *kv_index, scale, window
            )
        if self.prefill and (batch := inputs.varlen_batch(window, decoding=False)):
            out[batch.step_rows] = self.prefill(
                query[batch.step_rows], keys, values, batch, scale, window
            )


def select_kernels(
    device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]
) -> AttentionKernels:
    """Return the best attention kernels for this device, type and head sizes; none on a CPU.

    On a GPU that is FlashAttention 3 for all rows, which this call activates for the whole process.
    Where it is not available, Triton decodes and torch's own FlashAttention computes prompt chunks,
    each only if it is installed and supports the device.
    """
    if device.type != "cuda":
        return AttentionKernels()
    capability = torch.cuda.get_device_capability(device)
    has_flash = flash_attention.is_supported(capability, dtype, set(head_dims))
    if has_flash and flash_attention.activate_flash_attention_3(capability):
        kernels = AttentionKernels(flash_attention.decode_paged, flash_attention.attend_paged)
    else:
        kernels = AttentionKernels(
            _import_triton_decode(), flash_attention.attend_gathered if has_flash else None
        )
    log.info(
        "attention_kernels",
        decode=_kernel_name(kernels.decode),
        prefill=_kernel_name(kernels.prefill),
    )
    return kernels


def _import_triton_decode() -> DecodeKernel | None:
    if find_spec("triton") is None:
        return None
    from gpu_worker.engines.paged.attention.kernels.triton_decode_attention import split_decode

    return split_decode


def _kernel_name(kernel: DecodeKernel | PrefillKernel | None) -> str:
    return getattr(kernel, "__name__", "sdpa")

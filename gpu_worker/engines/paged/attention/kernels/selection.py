"""Which attention kernels run: the best that device, installed packages and type allow."""

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
    """One query token for each sequence; the contract is `split_decode`'s."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor,
        table: Tensor, lengths: Tensor, scale: float, window: SlidingWindow = None,
    ) -> Tensor: ...  # fmt: skip


class PrefillKernel(Protocol):
    """Many query tokens for each sequence; the contract is `flash.over_gathered`'s."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor,
        packed: VarlenBatch, scale: float, window: SlidingWindow,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class AttentionKernels:
    """What computes each part of a step; None: gather and scaled dot-product attention."""

    decode: DecodeKernel | None = None
    prefill: PrefillKernel | None = None

    def attend(
        self, plan: StepInputs, query: Tensor, keys: Tensor, values: Tensor,
        out: Tensor, scale: float, window: SlidingWindow,
    ) -> None:  # fmt: skip
        """Compute the rows of a step that there are kernels for: `[rows, heads, dim]` to `out`."""
        if self.decode and (packed := plan.varlen_batch(window, decoding=True)):
            seen = packed.block_table, packed.seq_lens
            out[packed.step_rows] = self.decode(
                query[packed.step_rows], keys, values, *seen, scale, window
            )
        if self.prefill and (packed := plan.varlen_batch(window, decoding=False)):
            out[packed.step_rows] = self.prefill(
                query[packed.step_rows], keys, values, packed, scale, window
            )


def select_kernels(
    device: torch.device, dtype: torch.dtype, dims: Iterable[int]
) -> AttentionKernels:
    """The best for layers of heads of these sizes; on a CPU none."""
    if device.type != "cuda":
        return AttentionKernels()
    capability = torch.cuda.get_device_capability(device)
    flashes = flash_attention.is_supported(capability, dtype, set(dims))
    if flashes and flash_attention.activate_flash_attention_3(capability):
        kernels = AttentionKernels(flash_attention.decode_paged, flash_attention.attend_paged)
    else:
        kernels = AttentionKernels(
            _import_triton_decode(), flash_attention.attend_gathered if flashes else None
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

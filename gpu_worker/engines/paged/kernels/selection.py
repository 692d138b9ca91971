"""Which attention kernels run: the best that device, installed packages and type allow."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import structlog
import torch
from torch import Tensor

from gpu_worker.engines.paged.kernels import flash
from gpu_worker.engines.paged.kernels.packed import Packed
from gpu_worker.engines.paged.plan import Plan
from gpu_worker.engines.paged.run import Window

log = structlog.get_logger()


class Decode(Protocol):
    """One query token for each sequence; the contract is `split_decode`'s."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor,
        table: Tensor, lengths: Tensor, scale: float, window: Window = None,
    ) -> Tensor: ...  # fmt: skip


class Prefill(Protocol):
    """Many query tokens for each sequence; the contract is `flash.over_gathered`'s."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor,
        packed: Packed, scale: float, window: Window,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """What computes each part of a step; None: gather and scaled dot-product attention."""

    decode: Decode | None = None
    prefill: Prefill | None = None

    def attend(
        self, plan: Plan, query: Tensor, keys: Tensor, values: Tensor,
        out: Tensor, scale: float, window: Window,
    ) -> None:  # fmt: skip
        """Compute the rows of a step that there are kernels for: `[rows, heads, dim]` to `out`."""
        if self.decode and (packed := plan.packed(window, decoding=True)):
            seen = packed.table, packed.lengths
            out[packed.at] = self.decode(query[packed.at], keys, values, *seen, scale, window)
        if self.prefill and (packed := plan.packed(window, decoding=False)):
            out[packed.at] = self.prefill(query[packed.at], keys, values, packed, scale, window)


def select(device: torch.device, dtype: torch.dtype, dims: Iterable[int]) -> Kernels:
    """The best for layers of heads of these sizes; on a CPU none."""
    if device.type != "cuda":
        return Kernels()
    capability = torch.cuda.get_device_capability(device)
    flashes = flash.takes(capability, dtype, set(dims))
    if flashes and flash.takes_blocks(capability):
        kernels = Kernels(flash.decode_over_blocks, flash.over_blocks)
    else:
        kernels = Kernels(_triton(), flash.over_gathered if flashes else None)
    log.info("attention_kernels", decode=_name(kernels.decode), prefill=_name(kernels.prefill))
    return kernels


def _triton() -> Decode | None:
    if find_spec("triton") is None:
        return None
    from gpu_worker.engines.paged.kernels.split_decode import split_decode

    return split_decode


def _name(kernel: Decode | Prefill | None) -> str:
    return getattr(kernel, "__name__", "sdpa")

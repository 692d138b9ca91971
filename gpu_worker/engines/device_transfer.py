"""Numbers on their way between the host and a device, without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `values` on the device.

    From memory that is not pinned, torch would wait until the device has done all it has to do.
    """
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[list[float]]:
    """The numbers of tensors of one device, flat, in one transfer: the step's only wait for it.

    As float64, which has every token id and float32 exactly.
    """
    numbers: list[float] = torch.cat([t.flatten().to(torch.float64) for t in tensors]).tolist()
    rest = iter(numbers)
    return [[next(rest) for _ in range(t.numel())] for t in tensors]

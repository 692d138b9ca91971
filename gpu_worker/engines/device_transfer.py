"""Copies numbers between the host and a device without making the host wait needlessly."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of `values` on the device, without waiting for the device.

    On CUDA the copy goes through pinned memory: from other memory, torch would wait until the
    device has finished all queued work.
    """
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[list[float]]:
    """Copy tensors of one device to the host in one transfer; return a flat list for each.

    Waits until the device has computed them, the only such wait in a step. Numbers travel as
    float64, which represents every token id and every float32 exactly.
    """
    numbers: list[float] = torch.cat([t.flatten().to(torch.float64) for t in tensors]).tolist()
    rest = iter(numbers)
    return [[next(rest) for _ in range(t.numel())] for t in tensors]

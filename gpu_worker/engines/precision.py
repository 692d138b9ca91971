"""Chooses the dtype that a model computes in: its checkpoint's, if the device supports it."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedConfig


def choose_dtype(config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: the checkpoint's, or float32 where a CPU would emulate that.

    A CPU emulates float16 always, and bfloat16 without AVX-512 or Arm's instructions for it: there
    a product of bfloat16 matrices takes up to six times as long as one of float32.
    """
    return _compute_dtype(config.dtype, device)


def loaded_size_ratio(directory: Path, device: torch.device) -> float:
    """Return how many times the size of its files a model's weights take once loaded.

    It is 1 if the weights keep their dtype. It is also 1 if config.json names no dtype or cannot be
    read; nothing is raised, since loading will report that.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
        stored = getattr(torch, config.get("dtype") or config.get("torch_dtype"))
        return float(_compute_dtype(stored, device).itemsize / stored.itemsize)
    except (OSError, ValueError, TypeError, AttributeError):
        return 1.0


def has_bfloat16_matmul() -> bool:
    """Return True if oneDNN can pre-pack and multiply bfloat16 matrices on this CPU."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _compute_dtype(stored: object, device: torch.device) -> torch.dtype:
    dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    emulated = dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bfloat16_matmul())
    return torch.float32 if device.type == "cpu" and emulated else dtype

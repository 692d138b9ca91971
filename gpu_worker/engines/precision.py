"""Chooses the dtype that a model computes in: its checkpoint's, if the device supports it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig


def choose_dtype(config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: the checkpoint's, or float32 where a CPU would emulate that.

    A CPU emulates float16 always, and bfloat16 without AVX-512 or Arm's instructions for it: there
    a product of bfloat16 matrices takes up to six times as long as one of float32.
    """
    return _compute_dtype(config.dtype, device)


def read_compute_dtype(directory: Path, device: torch.device) -> torch.dtype:
    """Return the dtype that `choose_dtype` chooses for a model's directory, by its config.json.

    It is float32 if config.json names no dtype or cannot be read; nothing is raised, since loading
    will report that.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
        return _compute_dtype(_named_dtype(config), device)
    except (OSError, ValueError, TypeError, AttributeError):
        return _compute_dtype(None, device)


def _named_dtype(config: Mapping[str, Any]) -> object:
    for part in (config, config.get("text_config") or {}):
        if name := part.get("dtype") or part.get("torch_dtype"):
            return getattr(torch, name)
    return None


def has_bfloat16_matmul() -> bool:
    """Return True if oneDNN can pre-pack and multiply bfloat16 matrices on this CPU."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _compute_dtype(stored: object, device: torch.device) -> torch.dtype:
    dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    if dtype.itemsize == 1:  # fp8 is a way to store weights: they are multiplied out
        dtype = torch.bfloat16
    emulated = dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bfloat16_matmul())
    return torch.float32 if device.type == "cpu" and emulated else dtype

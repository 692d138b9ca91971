"""Safetensors files and adapters made by hand: the registry reads their headers without torch."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from registry.checkpoints.safetensors_header import DTYPE_BITS

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
LORA_SHAPES = {f"{Q_PROJ}.lora_A.weight": (2, 8), f"{Q_PROJ}.lora_B.weight": (6, 2)}
LORA_CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "bias": "none",
}


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str] | None = None,
    fill: bytes = b"\0",
) -> None:
    """A file of tensors that are float32 where `dtypes` says nothing else; every byte is `fill`."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "F32")
        end = offset + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + fill * offset)


def write_adapter(
    directory: Path, shapes: Mapping[str, tuple[int, ...]] = LORA_SHAPES, **config: Any
) -> Path:
    """A directory as peft saves it, with these keys over those of a plain LoRA."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**LORA_CONFIG, **config}))
    write_safetensors(directory / "adapter_model.safetensors", shapes)
    return directory

"""Models' files and adapters made by hand: the registry reads them without torch."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
LORA_SHAPES = {f"{Q_PROJ}.lora_A.weight": (2, 8), f"{Q_PROJ}.lora_B.weight": (6, 2)}
TOKENIZER_JSON = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).to_str()
LORA_CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj"],
    "bias": "none",
}


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A file of float32 zeros."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * shape[0] * shape[-1]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + bytes(offset))


def write_adapter(
    directory: Path, shapes: Mapping[str, tuple[int, ...]] = LORA_SHAPES, **config: Any
) -> Path:
    """A directory as peft saves it, with these keys over those of a plain LoRA."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**LORA_CONFIG, **config}))
    write_safetensors(directory / "adapter_model.safetensors", shapes)
    return directory

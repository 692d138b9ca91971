"""Writes registry/checkpoints/model_types.json: what the installed transformers says of its types.

`python -m tests.engine.model_types`; the registry reads the file, since it cannot import
transformers. A test compares the two.
"""

import json
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from registry.checkpoints.model_types import FILE, KEYS, SUPPORTED_LAYER_TYPES

CAUSAL: dict[str, str] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
CLASSIFIERS: dict[str, str] = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
BASES: dict[str, Any] = modeling_auto.MODEL_MAPPING_NAMES
TEXT_ENCODERS: dict[str, str] = modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES


def collect() -> dict[str, Any]:
    """Return the content of the file."""
    return {
        "transformers": transformers.__version__,
        "types": {name: describe(name) for name in sorted(CONFIG_MAPPING)},
    }


def describe(name: str) -> dict[str, Any]:
    """Return what is said of one type, without what is empty."""
    kind = CONFIG_MAPPING[name]
    found = {
        "architectures": list_architectures(name),
        "generates": CAUSAL.get(name),
        "classifies": name in CLASSIFIERS,
        "embeds": name in BASES,
        "encodes": name in TEXT_ENCODERS,
        "tokenizer": TOKENIZER_MAPPING_NAMES.get(name),
        "defaults": defaults_of(kind),
        "names": {a: b for a, b in kind.attribute_map.items() if a in KEYS or b in KEYS},
        "text": text_part(kind),
    }
    return {key: value for key, value in found.items() if value}


def list_architectures(name: str) -> list[str]:
    """Return the names of all classes that transformers has for a type, whatever their task."""
    mappings = (m for n, m in vars(modeling_auto).items() if n.endswith("_MAPPING_NAMES"))
    found = (mapping.get(name) for mapping in mappings)
    names = {n for each in found if each for n in ([each] if isinstance(each, str) else each)}
    names = {each for each in names if not each.endswith("Config")}
    return sorted(names)


def defaults_of(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the defaults of a class for the keys that the registry reads.

    They are those of the fields, before a class computes others from them (`head_dim`). Kinds of
    layers are named if they are not supported; windows by the length of their pattern.
    """
    own = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
    given = {key: own[key] for key in KEYS if own.get(key) not in (None, False)}
    found = {kind.attribute_map.get(key, key): value for key, value in given.items()}
    layers: list[str] = []
    with suppress(Exception):  # some classes cannot be made without values
        layers = getattr(kind(), "layer_types", None) or []
    if unsupported := sorted(set(layers) - SUPPORTED_LAYER_TYPES):
        found["layer_types"] = unsupported
    elif length := pattern_length(layers):
        found["sliding_window_pattern"] = length
    return found


def pattern_length(layers: list[str]) -> int | None:
    """Return after how many layers one sees all, if that is regular and others have windows."""
    full = [n + 1 for n, each in enumerate(layers) if each == "full_attention"]
    length = full[0] if full else 0
    regular = list(range(length, len(layers) + 1, length or 1))
    return length if length > 1 and full == regular else None


def text_part(kind: type[PreTrainedConfig]) -> list[str] | None:
    """Return the key of a type's text configuration, and its type; None if it is the whole."""
    with suppress(Exception):  # several texts, or no default
        whole = kind()
        text = whole.get_text_config()
        for key in kind.sub_configs:
            if getattr(whole, key, None) is text:
                return [key, text.model_type]
    return None


def to_text(content: dict[str, Any]) -> str:
    """Return the file's text: a line for each type."""
    lines = (f"{json.dumps(n)}: {json.dumps(t)}" for n, t in content["types"].items())
    types = ",\n".join(lines)
    return f'{{"transformers": {json.dumps(content["transformers"])}, "types": {{\n{types}\n}}}}\n'


if __name__ == "__main__":
    Path(FILE).write_text(to_text(collect()))

"""Model directories made by hand: all files that `models add` wants, with weights of zeros."""

import json
from pathlib import Path
from typing import Any

from registry.checkpoints.completeness import ExpectedTensors, Shape
from registry.checkpoints.families import FAMILIES
from registry.checkpoints.model_types import read_types
from registry.models import EngineKind
from tests.support.safetensors_files import write_safetensors

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "num_experts": 2,
    "attn_logit_softcapping": None,  # what Gemma 2 has, and no engine runs
}
MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
]
Shapes = dict[str, tuple[int, ...]]


def config_of(model_type: str, engine: EngineKind = "transformers", **values: Any) -> Any:
    """A config.json, in the type's own names of keys."""
    names = FAMILIES[model_type].keys
    sizes = {names.get(key, key): value for key, value in SIZES.items()}
    own = {"architectures": [architecture_of(model_type, engine)], "model_type": model_type}
    return {**own, **sizes, **values}


def architecture_of(model_type: str, engine: EngineKind) -> str:
    """The class of transformers that an engine runs, by name."""
    kind = read_types()[model_type]
    ending = "ForSequenceClassification" if engine == "classify" else "Model"
    named = (name for name in kind.architectures if name.endswith(ending))
    return str(kind.generates if engine == "transformers" else next(named))


def shapes_of(config: dict[str, Any], engine: EngineKind = "transformers") -> Shapes:
    """The tensors that a checkpoint of this configuration has, under their full names.

    Experts behind a router are in one tensor.
    """
    expected = ExpectedTensors(FAMILIES[config["model_type"]], config, engine)
    shapes = {expected.full_name(name): _sizes(shape) for name, shape in expected.shapes.items()}
    layers = [name.removesuffix("gate.weight") for name in shapes if name.endswith(".gate.weight")]
    return shapes | {f"{layer}experts.down_proj": (2, 8, 12) for layer in layers}


def _sizes(shape: Shape) -> tuple[int, ...]:
    return tuple(7 if size is None else size for size in shape)


def write_model(
    directory: Path,
    config: dict[str, Any],
    shapes: Shapes | None = None,
    engine: EngineKind = "transformers",
    dtypes: dict[str, str] | None = None,
) -> Path:
    """A directory with config.json, weights and tokenizer.json; of an encoder with modules.json."""
    directory.mkdir(exist_ok=True)
    write_json(directory / "config.json", config)
    shapes = shapes_of(config, engine) if shapes is None else shapes
    write_safetensors(directory / "model.safetensors", shapes, dtypes)
    write_json(directory / "tokenizer.json", tokenizer_of(config["vocab_size"]))
    if engine == "embed":
        write_json(directory / "modules.json", MODULES)
    return directory


def tokenizer_of(tokens: int, **added: int) -> dict[str, Any]:
    """A tokenizer.json with so many tokens, and added ones by their text."""
    vocabulary = {f"t{number}": number for number in range(tokens)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    entries = [{"id": n, "content": text, "special": True, **flags} for text, n in added.items()]
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": entries}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))

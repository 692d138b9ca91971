"""The registry's tables of tensors are those of transformers, which the registry cannot import."""

import json
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from registry.checkpoints.completeness import ExpectedTensors
from registry.checkpoints.families import FAMILIES
from registry.checkpoints.model_types import read_types
from registry.models import EngineKind

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "num_labels": 5,
}
AUTO: dict[EngineKind, Any] = {
    "transformers": AutoModelForCausalLM,
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
}
DECODERS = [name for name, family in FAMILIES.items() if family.lm_head]
ENCODERS = [name for name, family in FAMILIES.items() if not family.lm_head]
# Used by no engine: sentence encoders pool token states by themselves.
UNUSED = ("pooler.",)


def shape_of(model_type: str) -> dict[str, Any]:
    kind = CONFIG_MAPPING[model_type]
    values = dict(SHAPE)
    if hasattr(kind(), "num_key_value_heads"):
        values["num_key_value_heads"] = 2
    if "head_dim" in read_types()[model_type].defaults or model_type in ("llama", "mistral"):
        values["head_dim"] = 24
    for key in ("num_experts", "num_local_experts"):
        if hasattr(kind(), key):
            values[key] = 4
    own = FAMILIES[model_type].keys
    return {own.get(key, key): value for key, value in values.items()}


def is_of_experts(name: str, model_type: str) -> bool:
    """Experts are compared by their numbers; Qwen's layers may be without them, and a router."""
    return ".experts." in name or (model_type == "qwen3_moe" and name.endswith("mlp.gate.weight"))


def compare(model_type: str, engine: EngineKind, values: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[model_type](**values)
    with torch.device("meta"):
        model = AUTO[engine].from_config(config)
    family = FAMILIES[model_type]
    written = json.loads(config.to_json_string(use_diff=False))
    expected = ExpectedTensors(family, written, engine)
    shapes = {expected.normalise(name): tuple(t.shape) for name, t in model.state_dict().items()}
    shapes = {name: shape for name, shape in shapes.items() if not is_of_experts(name, model_type)}
    if engine == "embed":
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(UNUSED)}
    wild = {name for name, shape in expected.shapes.items() if None in shape}
    assert wild <= {"encoder.relative_attention_bias.weight"}
    known = {
        name: shapes.get(name, ()) if name in wild else s for name, s in expected.shapes.items()
    }
    assert known == shapes
    full = {expected.full_name(name) for name in shapes}
    assert engine != "transformers" or full <= model.state_dict().keys()


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_decoders_tensors_are_those_of_the_table(model_type: str) -> None:
    """With its head, and as a model that classifies or embeds."""
    compare(model_type, "transformers", shape_of(model_type))
    compare(model_type, "embed", shape_of(model_type))


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoders_tensors_are_those_of_the_table(model_type: str) -> None:
    """With the head that classifies, and without."""
    compare(model_type, "classify", shape_of(model_type))
    compare(model_type, "embed", shape_of(model_type))


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "phi"]
)
def test_a_decoder_that_classifies_has_a_score(model_type: str) -> None:
    """In place of the output head."""
    compare(model_type, "classify", shape_of(model_type))


@pytest.mark.parametrize(
    ("model_type", "key"),
    [(name, key) for name, family in FAMILIES.items() for key in family.if_set],
)
def test_a_switch_changes_the_tensors_as_in_transformers(model_type: str, key: str) -> None:
    """Both ways, since the default differs between the types."""
    for value in (True, False):
        compare(model_type, "transformers", shape_of(model_type) | {key: value})

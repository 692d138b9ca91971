"""Checkpoints with a hole, or with what has no place, are refused by the names of the tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gpu_worker.engines.checkpoints.loading import IncompleteCheckpoint, UnsupportedModel
from gpu_worker.engines.paged.model_loader import load_model
from gpu_worker.engines.unary.classify import ClassifyEngine
from gpu_worker.engines.unary.embed import EmbedEngine
from tests.engine import tiny_encoders
from tests.engine.tiny_models import GROUPED, save

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]
LAYER = "model.layers.1.self_attn"


def change_tensors(directory: Path, change: Change) -> None:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def save_llama(directory: Path, **config: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**GROUPED | config))
    save(model, directory)
    return model


def without(part: str) -> Change:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def with_one(name: str, *shape: int) -> Change:
    return lambda tensors: tensors | {name: torch.ones(shape)}


def renamed(tensors: Tensors) -> Tensors:
    return {f"wrapped.{name}": tensor for name, tensor in tensors.items()}


HOLES: dict[str, tuple[Change, str]] = {
    "head": (without("lm_head"), r"1 tensor is missing: lm_head\.weight"),
    "layer": (without("layers.1."), r"9 tensors are missing: model\.layers\.1\.input_layernorm"),
    "one projection": (without(f"{LAYER}.q_proj"), rf"missing: {LAYER}\.q_proj\.weight"),
    "names": (renamed, r"30 tensors are missing: .* and 22 more \(30 of other names"),
    "shape": (
        with_one("model.norm.weight", 40),
        r"has another shape: model\.norm\.weight \(\(40,\) instead of \(48,\)\)",
    ),
    "scale": (with_one(f"{LAYER}.q_proj.weight_scale", 1), rf"{LAYER}\.q_proj\.weight_scale"),
    "bias": (with_one(f"{LAYER}.q_proj.bias", 64), rf"{LAYER}\.q_proj\.bias"),
    "layer too many": (
        with_one("model.layers.3.mlp.gate_proj.weight", 96, 48),
        r"has no place in the model: model\.layers\.3\.mlp",
    ),
}


@pytest.mark.parametrize("name", HOLES)
def test_a_checkpoint_that_is_not_the_models_is_refused(name: str, tmp_path: Path) -> None:
    """transformers draws random weights for a hole: other ones in each worker."""
    change, reason = HOLES[name]
    save_llama(tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(IncompleteCheckpoint, match=rf"LlamaForCausalLM.*{reason}"):
        load_model(tmp_path, "cpu")


HARMLESS: dict[str, Change] = {
    "buffer of an old version": with_one(f"{LAYER}.rotary_emb.inv_freq", 8),
    "another model's head": with_one("value_head.weight", 1, 48),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_for_something_else_is_left_out(name: str, tmp_path: Path) -> None:
    """Checkpoints often carry what belongs to training, or to an older version."""
    save_llama(tmp_path)
    change_tensors(tmp_path, HARMLESS[name])
    assert load_model(tmp_path, "cpu").vocab_size == GROUPED["vocab_size"]


def test_a_tied_head_may_be_missing_but_not_both_of_the_pair(tmp_path: Path) -> None:
    """The embedding is the head's weight, as long as one of them is there."""
    model = save_llama(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        loaded = load_model(tmp_path, "cpu").model
        loaded.set_attn_implementation("sdpa")
        assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4)
    change_tensors(tmp_path, without("embed_tokens"))
    with pytest.raises(IncompleteCheckpoint, match=r"missing: .*model\.embed_tokens\.weight"):
        load_model(tmp_path, "cpu")


def test_a_head_alone_serves_as_the_tied_embedding(tmp_path: Path) -> None:
    """Some tools save the pair under the head's name."""

    def swap(tensors: Tensors) -> Tensors:
        return without("embed_tokens")(tensors | {"lm_head.weight": tensors[EMBEDDING]})

    save_llama(tmp_path, tie_word_embeddings=True)
    wanted = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    change_tensors(tmp_path, swap)
    assert torch.equal(load_model(tmp_path, "cpu").model.get_parameter(EMBEDDING), wanted)


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("part", ["layer.1", "embeddings.word", "output.dense.bias"])
def test_an_encoder_with_a_hole_is_refused(part: str, tmp_path: Path) -> None:
    """Vectors of random weights look like any others."""
    tiny_encoders.encoder(tmp_path, "bert", "mean")
    change_tensors(tmp_path, without(part))
    with pytest.raises(IncompleteCheckpoint, match=rf"BertModel.*missing: .*{part}"):
        EmbedEngine.load(tmp_path, device="cpu")


def test_an_encoder_needs_no_pooler(tmp_path: Path) -> None:
    """Sentence encoders are often saved without: pooling starts from the tokens' states."""
    tiny_encoders.encoder(tmp_path, "bert", "mean")
    change_tensors(tmp_path, without("pooler"))
    assert EmbedEngine.load(tmp_path, device="cpu").idle


@pytest.mark.parametrize(
    ("architecture", "head"), [("bert", "classifier"), ("bert", "pooler"), ("qwen3", "score")]
)
def test_a_classifier_without_its_head_is_refused(
    architecture: str, head: str, tmp_path: Path
) -> None:
    """A reranker's scores would be random, and differ from worker to worker."""
    tiny_encoders.classifier(tmp_path, architecture)
    change_tensors(tmp_path, without(head))
    with pytest.raises(IncompleteCheckpoint, match=rf"missing: .*{head}"):
        ClassifyEngine.load(tmp_path, device="cpu")


def test_a_directory_that_transformers_cannot_load_is_refused_by_name(tmp_path: Path) -> None:
    """Its own error names neither the model nor the directory."""
    tiny_encoders.encoder(tmp_path, "bert", "mean")
    (tmp_path / "config.json").write_text('{"model_type": "llava", "architectures": ["Llava"]}')
    with pytest.raises(UnsupportedModel, match=f"Llava .*{tmp_path}"):
        ClassifyEngine.load(tmp_path, device="cpu")

"""Vectors of a directory are those that sentence-transformers makes of it, whatever it says."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import T5Config, T5ForConditionalGeneration

from api.tokenizer import load_tokenizer
from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.unary.embed import EmbedEngine
from registry.artifact_verification import ArtifactRefused
from registry.model_inspection import model_from
from tests.engine.tiny_encoders import SIZE, classifier, encoder
from tests.engine.tiny_models import run_to_end

TEXTS = ["Hello World", "The OLD mill by the stream", "a", "ÀÉ and more"]
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
POOLING, ENCODER = "1_Pooling/config.json", "config_sentence_transformers.json"
BERT = "sentence_bert_config.json"
PROMPTS = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"}
FLAGS = {
    "word_embedding_dimension": SIZE,
    "pooling_mode_lasttoken": True,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": True,
    "pooling_mode_cls_token": False,
}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "a prompt by default": {ENCODER: PROMPTS},
    "prompts, none by default": {ENCODER: {**PROMPTS, "default_prompt_name": None}},
    "an empty prompt by default": {ENCODER: {**PROMPTS, "default_prompt_name": "document"}},
    "a null prompt": {ENCODER: {"prompts": {"query": None}, "default_prompt_name": "query"}},
    "lowered": {BERT: {"do_lower_case": True, "max_seq_length": 50}},
    "lowered, of another model": {"sentence_roberta_config.json": {"do_lower_case": True}},
    "lowered behind a prompt": {BERT: {"do_lower_case": True}, ENCODER: PROMPTS},
    "cut": {ENCODER: {"truncate_dim": 16}},
    "cut beyond its width": {ENCODER: {"truncate_dim": 1000}},
    "cut, with a prompt": {ENCODER: {**PROMPTS, "truncate_dim": 7}},
    "max": {POOLING: {"pooling_mode": "max"}},
    "square root of the length": {POOLING: {"pooling_mode": "mean_sqrt_len_tokens"}},
    "weighted mean": {POOLING: {"pooling_mode": "weightedmean"}},
    "two modes": {POOLING: {"pooling_mode": ["lasttoken", "cls"]}},
    "all modes": {
        POOLING: {
            "pooling_mode": [
                "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
            ]
        }
    },
    "three modes in the older style": {POOLING: FLAGS},
    "no mode": {POOLING: {"pooling_mode_mean_tokens": False}},
    "the prompt left out, which is none": {POOLING: {"include_prompt": False}},
    "several modes cut": {POOLING: FLAGS, ENCODER: {"truncate_dim": 3 * SIZE - 1}},
}  # fmt: skip


def write(directory: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, content in files.items():
        if "word_embedding_dimension" not in content and name == POOLING:
            content = {"embedding_dimension": SIZE, **content}
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))


def ours(directory: Path) -> np.ndarray:
    """The vectors of a version that was registered, by the gateway's tokeniser and the engine."""
    model = model_from(directory, "m")
    inputs = load_tokenizer(model, model.default).encode(TEXTS, special=True)
    results = run_to_end(EmbedEngine.load(directory), [Sequence("a", inputs=inputs)])
    found = np.stack([np.frombuffer(v, "<f4") for v in results.terminals["a"].vectors or []])
    assert found.shape[1] == model.default.embedding_dimensions
    return found


def theirs(directory: Path) -> np.ndarray:
    made: np.ndarray = SentenceTransformer(str(directory), device="cpu").encode(TEXTS)
    return made


@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_vectors_are_those_of_sentence_transformers(
    tmp_path: Path, setting: str, architecture: str
) -> None:
    """A setting that is overlooked makes vectors that look well and find the wrong texts."""
    encoder(tmp_path, architecture, "mean")
    add_modules(tmp_path)
    write(tmp_path, {"tokenizer_config.json": TOKENIZER, POOLING: {}, **SETTINGS[setting]})
    np.testing.assert_allclose(ours(tmp_path), theirs(tmp_path), atol=2e-5)


def add_modules(directory: Path, *kinds: str) -> None:
    """Add modules behind those that are there, and number all, as sentence-transformers needs."""
    modules = json.loads((directory / "modules.json").read_text())
    for kind in kinds:
        path = f"{len(modules)}_{kind}"
        type_ = f"sentence_transformers.models.{kind}"
        modules.append({"idx": len(modules), "name": path, "path": path, "type": type_})
        (directory / path).mkdir()
    for number, module in enumerate(modules):
        module |= {"idx": number, "name": str(number)}
    (directory / "modules.json").write_text(json.dumps(modules))


def add_dense(
    directory: Path, path: str, outputs: int, *, activation: str, residual: bool, bias: bool
) -> None:
    settings: dict[str, Any] = {"in_features": 2 * SIZE, "out_features": outputs, "bias": bias}
    settings |= {"activation_function": activation, "use_residual": residual}
    weights = {"linear.weight": torch.randn(outputs, 2 * SIZE)}
    weights |= {"linear.bias": torch.randn(outputs)} if bias else {}
    if residual and outputs != 2 * SIZE:
        weights["residual.weight"] = torch.randn(outputs, 2 * SIZE)
    (directory / path / "config.json").write_text(json.dumps(settings))
    save_file(weights, directory / path / "model.safetensors")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("outputs", "bias"), [(2 * SIZE, True), (12, False)])
def test_layers_behind_several_poolings_are_applied_in_order(
    tmp_path: Path, outputs: int, bias: bool, residual: bool
) -> None:
    """Dense, with or without a way around, a norm of the layer, and what training alone needs."""
    encoder(tmp_path, "bert", "mean", normalise=False)
    pooling = {"embedding_dimension": SIZE, "pooling_mode": ["cls", "mean"]}
    write(tmp_path, {"tokenizer_config.json": TOKENIZER, POOLING: pooling})
    add_modules(tmp_path, "Dense", "LayerNorm", "Dropout", "Normalize")
    activation = "torch.nn.modules.linear.Identity"
    add_dense(tmp_path, "2_Dense", outputs, activation=activation, residual=residual, bias=bias)
    norm = {"norm.weight": torch.rand(outputs), "norm.bias": torch.randn(outputs)}
    save_file(norm, tmp_path / "3_LayerNorm/model.safetensors")
    write(tmp_path, {"3_LayerNorm/config.json": {"dimension": outputs}})
    write(tmp_path, {"4_Dropout/config.json": {"dropout": 0.5}})
    np.testing.assert_allclose(ours(tmp_path), theirs(tmp_path), atol=2e-5)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({ENCODER: {"default_prompt_name": "query"}}, "'query' is no prompt: none"),
        ({ENCODER: {"truncate_dim": 0}}, "truncate_dim 0"),
        ({ENCODER: PROMPTS, POOLING: {"include_prompt": False}}, "include_prompt"),
        ({POOLING: {"pooling_mode": ["mean", "median"]}}, "'median'; cls, max"),
        ({BERT: {"transformer_task": "text-generation"}}, "'text-generation'"),
        ({BERT: {"modality_config": {"message": {}}}}, "without a chat template"),
        ({BERT: {"processing_kwargs": {"text": {"padding": "max_length"}}}}, "processing_kwargs"),
        ({ENCODER: {"model_type": "ColBERT"}}, "'ColBERT': only SentenceTransformer"),
    ],
)
def test_what_is_not_done_is_refused_at_registration(
    tmp_path: Path, files: dict[str, dict[str, Any]], reason: str
) -> None:
    """By the file and the setting, before anybody gets a vector."""
    encoder(tmp_path, "bert", "mean")
    write(tmp_path, files)
    with pytest.raises(ArtifactRefused, match=reason):
        model_from(tmp_path, "m")


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([("Transformer", ""), ("Pooling", "1_Pooling"), ("CNN", "2")], "unknown here: CNN"),
        ([("Transformer", "0_Transformer"), ("Pooling", "1_Pooling")], "files are at the top"),
        ([("Transformer", ""), ("Normalize", "2"), ("Pooling", "1_Pooling")], "one Pooling"),
        ([("StaticEmbedding", "")], "unknown here: StaticEmbedding"),
    ],
)
def test_modules_in_another_order_are_refused(
    tmp_path: Path, modules: list[tuple[str, str]], reason: str
) -> None:
    encoder(tmp_path, "bert", "mean")
    listed = [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in modules]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ArtifactRefused, match=reason):
        model_from(tmp_path, "m")


def test_a_dense_layer_of_another_width_is_refused(tmp_path: Path) -> None:
    """With both numbers."""
    encoder(tmp_path, "bert", "mean", dense=12)
    write(tmp_path, {POOLING: {"pooling_mode": ["cls", "mean"]}})
    with pytest.raises(ArtifactRefused, match=rf"vectors of {SIZE} numbers, they have {2 * SIZE}"):
        model_from(tmp_path, "m")


def test_a_t5s_encoder_embeds_without_its_decoder(tmp_path: Path) -> None:
    """Directories of sentence-t5 and GTR have the decoder's weights, too, which nobody reads."""
    encoder(tmp_path, "bert", "mean")
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 48}
    sizes |= {"vocab_size": 256, "d_model": SIZE, "n_positions": 64}
    config = T5Config(**sizes | {"decoder_start_token_id": 0})
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    write(tmp_path, {"tokenizer_config.json": TOKENIZER, POOLING: {"pooling_mode": "mean"}})
    np.testing.assert_allclose(ours(tmp_path), theirs(tmp_path), atol=1e-5)


def test_a_classifiers_weights_under_a_pooling_make_vectors(tmp_path: Path) -> None:
    """Its modules say what it is for, and not the architecture in config.json."""
    encoder(tmp_path / "encoder", "bert", "mean")
    shutil.copytree(tmp_path / "encoder", tmp_path / "both")
    classifier(tmp_path / "both", "bert")
    write(tmp_path / "both", {"tokenizer_config.json": TOKENIZER, POOLING: {}})
    np.testing.assert_allclose(ours(tmp_path / "both"), theirs(tmp_path / "both"), atol=2e-5)

"""Scores of pairs are those that sentence-transformers gives them, whatever the directory says."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from api.tokenizer import load_tokenizer
from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.unary.classify import ClassifyEngine
from registry.artifact_verification import ArtifactRefused
from registry.model_inspection import model_from
from registry.tokenizer.token_types import CLASSES
from tests.engine.tiny_encoders import classifier
from tests.engine.tiny_models import run_to_end

QUERY, TEXTS = "What Turns it?", ["the Mill", "", "a stream that turns the OLD mill"]
MODULES = [
    {
        "idx": 0,
        "name": "0",
        "path": "",
        "type": "sentence_transformers.base.modules.transformer.Transformer",
    }
]
IDENTITY = "torch.nn.modules.linear.Identity"
TYPES = ["input_ids", "token_type_ids", "attention_mask"]
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
KIND = {"model_type": "CrossEncoder"}
BERT, ENCODER = "sentence_bert_config.json", "config_sentence_transformers.json"
# As CrossEncoder.save_pretrained writes it
SAVED: dict[str, Any] = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "transformers alone": {},
    "transformers alone, with types": {
        "tokenizer_config.json": {**TOKENIZER, "model_input_names": TYPES}
    },
    "transformers alone, with files that it does not read": {
        BERT: {"do_lower_case": True},
        ENCODER: {**KIND, "activation_fn": IDENTITY},
    },
    "a module": {"modules.json": MODULES, ENCODER: KIND, BERT: SAVED},
    "with types": {
        "modules.json": MODULES,
        "tokenizer_config.json": {**TOKENIZER, "model_input_names": TYPES},
        ENCODER: KIND,
        BERT: SAVED,
    },
    "an activation": {
        "modules.json": MODULES,
        ENCODER: {**KIND, "activation_fn": IDENTITY},
        BERT: SAVED,
    },
    "lowered": {"modules.json": MODULES, ENCODER: KIND, BERT: {**SAVED, "do_lower_case": True}},
    "a prompt by default": {
        "modules.json": MODULES,
        ENCODER: {**KIND, "prompts": {"q": "Query: "}, "default_prompt_name": "q"},
        BERT: SAVED,
    },
}


def write(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def ours(directory: Path) -> np.ndarray:
    """The scores of a version that was registered, by the gateway's tokeniser and the engine."""
    model = model_from(directory, "m")
    pairs = load_tokenizer(model, model.default).encode_pairs(QUERY, TEXTS)
    request = Sequence("a", inputs=[p.tokens for p in pairs], splits=[p.split for p in pairs])
    results = run_to_end(ClassifyEngine.load(directory), [request])
    rows = [np.frombuffer(row, "<f4") for row in results.terminals["a"].vectors or []]
    return np.concatenate(rows)


def theirs(directory: Path) -> np.ndarray:
    encoder = CrossEncoder(str(directory), device="cpu", local_files_only=True)
    scores: np.ndarray = encoder.predict([(QUERY, text) for text in TEXTS])
    return scores


@pytest.mark.parametrize("architecture", ["bert", "roberta", "qwen3"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_scores_are_those_of_sentence_transformers(
    tmp_path: Path, setting: str, architecture: str
) -> None:
    """A setting that is overlooked makes scores that look well and rank the wrong texts."""
    classifier(tmp_path, architecture, 1, type_vocab_size=2)
    write(tmp_path, {"tokenizer_config.json": TOKENIZER, **SETTINGS[setting]})
    np.testing.assert_allclose(ours(tmp_path), theirs(tmp_path), atol=2e-5)


def test_the_tokenisers_that_mark_the_second_text_are_those_of_transformers() -> None:
    """Of other classes the model is given no types, though tokenizer.json has them."""
    marking = set()
    for name in {*TOKENIZER_MAPPING_NAMES.values(), *CLASSES} - {None}:
        found: Any = tokenizer_class_from_name(str(name))
        with suppress(ImportError, AttributeError):  # of sentencepiece; a pair of tokenisers
            if "token_type_ids" in found.model_input_names:
                marking.add(name)
    assert marking == CLASSES


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({BERT: {"transformer_task": "text-generation"}}, "'text-generation'"),
        ({BERT: {**SAVED, "modality_config": {"message": {}}}}, "modality_config None for text"),
        ({BERT: {**SAVED, "processing_kwargs": {"text": {"padding": "x"}}}}, "processing_kwargs"),
        ({ENCODER: {"model_type": "SparseEncoder"}}, "'SparseEncoder': only CrossEncoder"),
        ({ENCODER: {**KIND, "activation_fn": "evil.Run"}}, r"'evil\.Run'"),
        ({"modules.json": [*MODULES, {"type": "x.LogitScore", "path": "1"}]}, "LogitScore"),
    ],
)
def test_what_is_not_done_is_refused_at_registration(
    tmp_path: Path, files: dict[str, Any], reason: str
) -> None:
    """By the file and the setting, before anybody gets a score."""
    classifier(tmp_path, "bert", 1)
    write(tmp_path, {"modules.json": MODULES, **files})
    with pytest.raises(ArtifactRefused, match=reason):
        model_from(tmp_path, "m")

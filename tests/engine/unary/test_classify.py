"""Probabilities are those of the model's own head, however inputs are batched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.unary.classify import ClassifyEngine
from registry.artifact_verification import ArtifactRefused
from tests.engine.tiny_encoders import CLASSIFIERS, CONTEXT, PAD, classifier, prompt
from tests.engine.tiny_models import Results, run_to_end

INPUTS = [prompt(n, length) for n, length in enumerate((1, 30, 7, CONTEXT, 2))]


def _logits(directory: Path, tokens: list[int], types: list[int] | None = None) -> torch.Tensor:
    """Of the model itself, for one input without padding."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(directory)
    more = {"token_type_ids": torch.tensor([types])} if types else {}
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), **more).logits[0]
    return logits


def _rows(results: Results, name: str = "a") -> list[np.ndarray]:
    return [np.frombuffer(row, "<f4") for row in results.terminals[name].vectors or []]


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_probabilities_equal_a_direct_computation(tmp_path: Path, architecture: str) -> None:
    """Alone and in one batch, of encoders and of a decoder that scores its last token."""
    engine = ClassifyEngine.load(classifier(tmp_path, architecture))
    results = run_to_end(engine, [Sequence("a", inputs=INPUTS)])
    assert results.terminals["a"].labels == ["l0", "l1", "l2"]
    for together, tokens in zip(_rows(results), INPUTS, strict=True):
        (alone,) = _rows(run_to_end(engine, [Sequence("a", inputs=[tokens])]))
        expected = _logits(tmp_path, tokens).softmax(-1).numpy()
        np.testing.assert_allclose(alone, expected, atol=1e-5)
        np.testing.assert_allclose(together, expected, atol=1e-5)


_IDENTITY, _SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("labels", "config", "activation"),
    [
        (3, {"problem_type": "single_label_classification"}, lambda x: x.softmax(-1)),
        (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        (1, {}, torch.sigmoid),
        (1, {"problem_type": "regression"}, lambda x: x),
        (1, {"sentence_transformers": {"activation_fn": _IDENTITY}}, lambda x: x),
        (1, {"sbert_ce_default_activation_function": _IDENTITY}, lambda x: x),
        (3, {"sentence_transformers": {"activation_fn": _SIGMOID}}, torch.sigmoid),
    ],
)
def test_the_configuration_says_what_becomes_of_logits(
    tmp_path: Path, labels: int, config: dict[str, Any], activation: Any
) -> None:
    """As transformers trains by problem type, and as cross-encoders name it."""
    engine = ClassifyEngine.load(classifier(tmp_path, "bert", labels, **config))
    (row,) = _rows(run_to_end(engine, [Sequence("a", inputs=[prompt(1, 9)])]))
    expected = activation(_logits(tmp_path, prompt(1, 9))).numpy()
    np.testing.assert_allclose(row, expected, atol=1e-5)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    """At load; code that is not ours or torch's is never run."""
    classifier(tmp_path, "bert", sbert_ce_default_activation_function="evil.module.Run")
    with pytest.raises(ArtifactRefused, match=r"evil\.module\.Run"):
        ClassifyEngine.load(tmp_path)


def test_the_second_text_of_a_pair_has_its_type(tmp_path: Path) -> None:
    """BERT was trained to tell the two apart; pairs and single texts share a batch."""
    engine = ClassifyEngine.load(classifier(tmp_path, "bert", 1))
    tokens = prompt(1, 12)
    pair = Sequence("pair", inputs=[tokens, prompt(2, 20)], splits=[5, 9])
    results = run_to_end(engine, [pair, Sequence("text", inputs=[tokens])])
    expected = torch.sigmoid(_logits(tmp_path, tokens, [0] * 5 + [1] * 7)).numpy()
    plain = torch.sigmoid(_logits(tmp_path, tokens)).numpy()
    np.testing.assert_allclose(_rows(results, "pair")[0], expected, atol=1e-5)
    np.testing.assert_allclose(_rows(results, "text")[0], plain, atol=1e-5)
    assert abs(expected - plain).max() > 1e-3


@pytest.mark.parametrize("architecture", ["distilbert", "roberta", "qwen3"])
def test_a_model_without_types_takes_pairs_too(tmp_path: Path, architecture: str) -> None:
    """It tells two texts apart by what stands between them."""
    engine = ClassifyEngine.load(classifier(tmp_path, architecture, 1))
    (row,) = _rows(run_to_end(engine, [Sequence("a", inputs=[prompt(1, 12)], splits=[5])]))
    expected = torch.sigmoid(_logits(tmp_path, prompt(1, 12))).numpy()
    np.testing.assert_allclose(row, expected, atol=1e-5)


def test_a_decoder_needs_no_padding_id(tmp_path: Path) -> None:
    """Many have none; and a text may end with it where there is one."""
    engine = ClassifyEngine.load(classifier(tmp_path, "qwen3", pad_token_id=None))
    tokens = [*prompt(1, 9), PAD]
    rows = _rows(run_to_end(engine, [Sequence("a", inputs=[tokens, prompt(2, 30)])]))
    expected = _logits(tmp_path, tokens).softmax(-1).numpy()
    np.testing.assert_allclose(rows[0], expected, atol=1e-5)


def test_the_longest_input_of_a_roberta_runs(tmp_path: Path) -> None:
    """Its positions begin behind the padding's id: two fewer than its table has."""
    engine = ClassifyEngine.load(classifier(tmp_path, "roberta"))
    results = run_to_end(engine, [Sequence("fits", inputs=[prompt(1, CONTEXT)])])
    assert results.terminals["fits"].finish == "stop"
    results = run_to_end(engine, [Sequence("long", inputs=[prompt(1, CONTEXT + 1)])])
    assert results.terminals["long"].error is not None
    assert results.terminals["long"].error.code == "context_length_exceeded"

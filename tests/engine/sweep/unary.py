"""Serves tiny random encoders and rerankers, and compares them with plain transformers."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig

from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.unary.classify import ClassifyEngine
from gpu_worker.engines.unary.embed import EmbedEngine
from gpu_worker.engines.unary.engine import UnaryEngine
from tests.engine.sweep.causal import Result, compare_with_registration
from tests.engine.sweep.tiny_configs import tiny_config
from tests.engine.tiny_encoders import write_pooling
from tests.engine.tiny_models import prompt, run_to_end, save

ENCODERS = (
    "AlbertConfig", "BertConfig", "CamembertConfig", "ConvBertConfig", "DebertaV2Config",
    "DistilBertConfig", "ElectraConfig", "ErnieConfig", "EuroBertConfig", "Gemma3TextConfig",
    "LlamaConfig", "MPNetConfig", "MistralConfig", "ModernBertConfig", "NomicBertConfig",
    "NystromformerConfig", "Qwen2Config", "Qwen3Config", "RobertaConfig", "RoFormerConfig",
    "XLMRobertaConfig",
)  # fmt: skip
RERANKERS = (
    "BertConfig", "DebertaV2Config", "ModernBertConfig", "Qwen3Config", "XLMRobertaConfig",
)  # fmt: skip
Rows = Callable[[Path, list[list[int]]], np.ndarray]
LENGTHS = (1, 30, 7, 64, 2)
TOLERANCE = 1e-4


def sweep_encoders() -> Iterator[Result]:
    """Yield the result of each encoder, whose vectors must be those of sentence-transformers."""
    for name in ENCODERS:
        with tempfile.TemporaryDirectory() as directory:
            result = _compare(name, AutoModel, Path(directory), EmbedEngine, _sentence_vectors)
            yield compare_with_registration(result, Path(directory))


def sweep_rerankers() -> Iterator[Result]:
    """Yield the result of each reranker, whose scores must be those of transformers."""
    for name in RERANKERS:
        auto_class = AutoModelForSequenceClassification
        with tempfile.TemporaryDirectory() as directory:
            result = _compare(name, auto_class, Path(directory), ClassifyEngine, _scores)
            yield compare_with_registration(result, Path(directory))


def _compare(
    name: str, auto_class: type, directory: Path, engine: type[UnaryEngine], compute_rows: Rows
) -> Result:
    inputs = [prompt(n, length) for n, length in enumerate(LENGTHS)]
    try:
        architecture = _save_random(getattr(transformers, name), auto_class, directory)
        wanted = compute_rows(directory, inputs)
    except Exception as error:
        return Result(name, "not built", f"{type(error).__name__}: {error}")
    try:
        made = engine.load(directory, device="cpu")
        terminal = run_to_end(made, [Sequence("a", inputs=inputs)]).terminals["a"]
    except UnsupportedModel as error:
        return Result(architecture, "refused", str(error))
    except Exception as error:
        return Result(architecture, "wrong", f"{type(error).__name__}: {error}")
    if terminal.error:
        return Result(architecture, "wrong", str(terminal.error))
    rows = np.stack([np.frombuffer(row, "<f4") for row in terminal.vectors or []])
    if (off := float(abs(rows - wanted).max())) > TOLERANCE:
        return Result(architecture, "wrong", f"rows are off by {off:.3g}")
    return Result(architecture, "equal")


def _save_random(kind: type[PreTrainedConfig], auto_class: type, directory: Path) -> str:
    """Save a tiny model with one label, a tokeniser and a pooling; return its class's name."""
    torch.manual_seed(7)
    config = tiny_config(kind)
    config.is_decoder, config.num_labels = False, 1
    model = auto_class.from_config(config)  # type: ignore[attr-defined]
    save(model, directory)
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}'
    (directory / "tokenizer_config.json").write_text(settings)
    write_pooling(directory, config.hidden_size)
    return type(model).__name__


@torch.inference_mode()
def _sentence_vectors(directory: Path, inputs: list[list[int]]) -> np.ndarray:
    """Return what sentence-transformers makes of each input alone, without padding."""
    model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
    rows = [
        model({"input_ids": (ids := torch.tensor([each])), "attention_mask": torch.ones_like(ids)})
        for each in inputs
    ]
    return np.stack([row["sentence_embedding"][0].numpy() for row in rows])


@torch.inference_mode()
def _scores(directory: Path, inputs: list[list[int]]) -> np.ndarray:
    """Return the score of each input alone, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    if model.config.pad_token_id is None:
        model.config.pad_token_id = 0
    logits: list[Tensor] = [model(torch.tensor([each])).logits[0] for each in inputs]
    return np.stack([each.sigmoid().numpy() for each in logits])

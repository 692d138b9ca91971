"""Serves tiny random encoders and rerankers, and compares them with sentence-transformers."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from api.tokenizer import load_tokenizer
from gpu_worker.engines.checkpoints.loading import UnsupportedModel
from gpu_worker.engines.engine import Sequence
from gpu_worker.engines.unary.classify import ClassifyEngine
from gpu_worker.engines.unary.embed import EmbedEngine
from gpu_worker.engines.unary.engine import UnaryEngine
from registry.artifact_verification import ArtifactRefused
from registry.checkpoints.model_types import read_types
from registry.model_inspection import inspect_model, make_record
from tests.engine.sweep.causal import (
    LIMIT_SECONDS,
    Result,
    compare_with_registration,
    model_class,
    time_limit,
)
from tests.engine.sweep.tiny_configs import kind_parameters, tiny_config
from tests.engine.tiny_encoders import write_pooling
from tests.engine.tiny_models import prompt, run_to_end

LENGTHS = (1, 30, 7, 64, 2)
QUERY = "What turns the mill?"
TEXTS = ("A stream.", "", "The miller, who lives by the OLD stream, says that it is the wind", "It")
SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]")  # tokens 0, 1 and 2
TOKENIZER_CONFIG = (
    '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128, "pad_token": "[PAD]"}'
)
TOLERANCE = 1e-3  # of numbers up to 1
Wanted = tuple[Sequence, np.ndarray]  # a request, and the rows that its inputs must get


def sweep_encoders() -> Iterator[Result]:
    """Yield the result of each encoder, whose vectors must be those of sentence-transformers."""
    for kind in _text_models(MODEL_MAPPING):
        yield _try(kind, AutoModel, EmbedEngine, _embed)


def sweep_rerankers() -> Iterator[Result]:
    """Yield the result of each reranker, whose scores must be those of sentence-transformers."""
    for kind in _text_models(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING):
        yield _try(kind, AutoModelForSequenceClassification, ClassifyEngine, _score)


def _text_models(mapping: Mapping[Any, Any]) -> Iterator[type[PreTrainedConfig]]:
    """Yield the configurations of models that read texts and have no decoder beside an encoder.

    The latter are refused by their type.
    """
    for kind in dict.fromkeys(mapping):
        defaults = read_types()[kind.model_type].defaults
        if "vocab_size" in kind_parameters(kind) and not defaults.get("is_encoder_decoder"):
            with suppress(ValueError):  # a class that this release names and does not have
                if model_class(mapping, kind).main_input_name == "input_ids":
                    yield kind


def _try(
    kind: type[PreTrainedConfig],
    auto_class: type,
    engine: type[UnaryEngine],
    compute: Callable[[Path], Wanted],
) -> Result:
    """Build a model of a configuration, serve it, and compare.

    Some random models amplify what float32 rounds: one that is equal in float64 is equal.
    """
    result = _try_in(torch.float32, kind, auto_class, engine, compute)
    if result.outcome == "wrong":
        exact = _try_in(torch.float64, kind, auto_class, engine, compute)
        return exact if exact.outcome == "equal" else result
    return result


def _try_in(
    dtype: torch.dtype,
    kind: type[PreTrainedConfig],
    auto_class: type,
    engine: type[UnaryEngine],
    compute: Callable[[Path], Wanted],
) -> Result:
    with tempfile.TemporaryDirectory() as temporary, time_limit(LIMIT_SECONDS):
        directory, name = Path(temporary), kind.__name__
        try:
            name = _save_random(kind, auto_class, directory, dtype)
            task = inspect_model(directory).engine
            request, wanted = compute(directory)
        except ArtifactRefused as error:
            return Result(name, "refused", str(error), is_declared=True)
        except Exception as error:
            return Result(name, "not built", f"{type(error).__name__}: {error}")
        result = _compare(name, engine, directory, request, wanted)
        return compare_with_registration(result, directory, task, kind.model_type)


def _compare(
    architecture: str,
    engine: type[UnaryEngine],
    directory: Path,
    request: Sequence,
    wanted: np.ndarray,
) -> Result:
    try:
        terminal = run_to_end(engine.load(directory, device="cpu"), [request]).terminals["a"]
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


def _save_random(
    kind: type[PreTrainedConfig], auto_class: type, directory: Path, dtype: torch.dtype
) -> str:
    """Save a tiny model with one label, a tokeniser and a pooling; return its class's name."""
    torch.manual_seed(7)
    config = tiny_config(kind)
    config.is_decoder, config.num_labels, config.pad_token_id = False, 1, 0
    model = auto_class.from_config(config, dtype=dtype)  # type: ignore[attr-defined]
    model.save_pretrained(directory)
    _pair_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(TOKENIZER_CONFIG)
    if auto_class is AutoModel:
        write_pooling(directory, config.hidden_size)
    return type(model).__name__


def _pair_tokenizer() -> Tokenizer:
    """Return a tokeniser of bytes, with special tokens around texts and between those of a pair."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    made = Tokenizer(BPE(tokens, []))
    made.add_special_tokens(list(SPECIAL_TOKENS))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokens[token]) for token in SPECIAL_TOKENS[1:]],
    )
    return made


@torch.inference_mode()
def _embed(directory: Path) -> Wanted:
    """Return inputs, and the vector of each alone, without padding."""
    inputs = [prompt(n, length) for n, length in enumerate(LENGTHS)]
    model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
    rows = [
        model({"input_ids": (ids := torch.tensor([each])), "attention_mask": torch.ones_like(ids)})
        for each in inputs
    ]
    vectors = np.stack([row["sentence_embedding"][0].numpy() for row in rows])
    return Sequence("a", inputs=inputs), vectors


def _score(directory: Path) -> Wanted:
    """Return pairs of a query and a text as a gateway encodes them, and the score of each."""
    model = make_record(directory, "m")
    pairs = load_tokenizer(model, model.default).encode_pairs(QUERY, TEXTS)
    request = Sequence(
        "a", inputs=[pair.tokens for pair in pairs], splits=[pair.split for pair in pairs]
    )
    encoder = CrossEncoder(str(directory), device="cpu", local_files_only=True)
    scores = [encoder.predict([(QUERY, text)], show_progress_bar=False) for text in TEXTS]
    return request, np.stack(scores)

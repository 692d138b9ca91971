"""Tiny random models for unary work, saved as directories, with a tokeniser of bytes and pairs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    NystromformerConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from transformers import NystromformerModel as Nystromformer

VOCABULARY, CONTEXT, SIZE = 256, 64, 32
PAD, CLS, SEP = 0, 1, 2

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.5,
    "pad_token_id": PAD,
}
_QWEN3 = _SHAPE | {"num_key_value_heads": 1, "head_dim": 16}
_ROBERTA = _SHAPE | {
    "max_position_embeddings": CONTEXT + 2,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
_DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": SIZE,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 48,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.5,
}

Build = tuple[Callable[..., PreTrainedConfig], dict[str, Any], type[PreTrainedModel]]
ENCODERS: dict[str, Build] = {
    "bert": (BertConfig, _SHAPE, BertModel),
    "qwen3": (Qwen3Config, _QWEN3, Qwen3ForCausalLM),
    "nystromformer": (NystromformerConfig, _SHAPE, Nystromformer),
}
CLASSIFIERS: dict[str, Build] = {
    "bert": (BertConfig, _SHAPE, BertForSequenceClassification),
    "distilbert": (DistilBertConfig, _DISTILBERT, DistilBertForSequenceClassification),
    "roberta": (RobertaConfig, _ROBERTA, RobertaForSequenceClassification),
    "qwen3": (Qwen3Config, _QWEN3, Qwen3ForSequenceClassification),
}


def encoder(
    path: Path, architecture: str, pooling: str, *, normalise: bool = True, dense: int | None = None
) -> Path:
    """A sentence-transformers directory; `dense` is the width of a layer behind the pooling."""
    _save(path, ENCODERS[architecture])
    steps = {"Transformer": "", "Pooling": "1_Pooling"}
    _write(path / "1_Pooling", {"pooling_mode": pooling})
    if dense:
        steps["Dense"] = "2_Dense"
        settings = {"in_features": SIZE, "out_features": dense, "bias": True}
        name = "torch.nn.modules.activation.Tanh"
        _write(path / "2_Dense", settings | {"activation_function": name})
        weights = {"linear.weight": torch.randn(dense, SIZE), "linear.bias": torch.randn(dense)}
        save_file(weights, path / "2_Dense/model.safetensors")
    steps |= {"Normalize": "3_Normalize"} if normalise else {}
    _write_modules(path, steps)
    return path


def classifier(path: Path, architecture: str, labels: int = 3, **config: Any) -> Path:
    """The directory of a model with a classification head; labels are called `l0`, `l1`, …"""
    names = {"id2label": {number: f"l{number}" for number in range(labels)}}
    kind, shape, made = CLASSIFIERS[architecture]
    return _save(path, (kind, shape | names | config, made))


def prompt(number: int, length: int) -> list[int]:
    """Pseudo-random ids, without the ones of special meaning."""
    generator = torch.Generator().manual_seed(number)
    ids: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return ids


def _save(path: Path, build: Build) -> Path:
    kind, shape, made = build
    torch.manual_seed(3)
    model: PreTrainedModel = made(kind(**shape))
    model.save_pretrained(path)
    _tokenizer().save(str(path / "tokenizer.json"))
    return path


def _tokenizer() -> Tokenizer:
    """A character is its code point, within BERT's special tokens and types."""
    words = {chr(code): code for code in range(3, VOCABULARY)}
    made = Tokenizer(WordLevel({"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, **words}, "?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return made


def write_pooling(path: Path, size: int) -> None:
    """Write the files of sentence-transformers into a model's directory: mean, then length one."""
    _write(path / "1_Pooling", {"pooling_mode_mean_tokens": True, "word_embedding_dimension": size})
    steps = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    (path / "2_Normalize").mkdir()
    _write_modules(path, steps)


def _write_modules(path: Path, steps: dict[str, str]) -> None:
    """Write modules.json; `steps` are the folders of modules, by their kind, in order."""
    types = [
        {"idx": n, "name": str(n), "path": p, "type": f"sentence_transformers.models.{t}"}
        for n, (t, p) in enumerate(steps.items())
    ]
    (path / "modules.json").write_text(json.dumps(types))


def _write(place: Path, settings: dict[str, Any]) -> None:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(settings))

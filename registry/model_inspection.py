"""Reads a model's engine, task, lengths, vocabulary and chat template from its own files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from registry.artifact_verification import (
    SHORT_DIGEST,
    ArtifactRefused,
    combine_digests,
    hash_files,
    read_json,
    read_json_object,
)
from registry.models import EngineKind, Model, Task, Version

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_BEHIND_PADDING = ("roberta", "camembert", "mpnet", "longformer", "data2vec-text")
_TRAINED_LENGTHS = (
    ("sentence_bert_config.json", "max_seq_length"),
    ("tokenizer_config.json", "model_max_length"),
)
_CLASSIFIES = "ForSequenceClassification"
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class ModelDescription:
    """Those fields of a model's record that follow from the model's own files."""

    engine: EngineKind
    task: Task
    context_length: int
    vocab_size: int
    embedding_dimensions: int | None = None
    num_labels: int | None = None
    chat_template: str | None = None


def inspect_model(directory: Path) -> ModelDescription:
    """Return what the files in a model's directory say: engine, task, lengths, chat template.

    Raises `ArtifactRefused` if the files do not say enough, or the model is of no supported kind.
    """
    config = _read_config(directory)
    architectures = _read_architectures(config)
    if any(each.endswith(_CLASSIFIES) for each in architectures):
        return _describe_classifier(directory, config)
    if (directory / "modules.json").exists():
        return _describe_encoder(directory, config)
    if not any(each.endswith(_GENERATES) for each in architectures):
        raise ArtifactRefused(
            "config.json",
            f"architectures {config.get('architectures')} is no causal language model and no "
            "sequence classifier, and there is no modules.json of a sentence encoder",
        )
    return ModelDescription(
        "transformers",
        "generate",
        _first_number(config, _LENGTHS),
        _first_number(config, ("vocab_size",)),
        chat_template=read_chat_template(directory),
    )


def model_from(directory: Path, name: str, version: str | None = None, **fields: Any) -> Model:
    """Return a model's record with one version, which consists of the files in `directory`.

    The version's id is `version` or, by default, the first 12 hex digits of the digest over the
    files. `fields` override what the files say. Raises `ArtifactRefused` for files that must not be
    there or do not say enough. Reads and hashes every file: call it in a thread.
    """
    files = hash_files(directory)
    digest = combine_digests(files)
    made = Version(
        id=version or digest[:SHORT_DIGEST],
        directory=str(directory.resolve()),
        files=files,
        digest=digest,
    )
    return Model(
        **{**vars(inspect_model(directory)), **fields},
        name=name,
        versions={made.id: made},
        default_version=made.id,
    )


def read_context_length(directory: Path) -> int:
    """Return the longest sequence in tokens according to the directory's config.json.

    Raises `ArtifactRefused` if config.json is missing or does not say.
    """
    return _first_number(_read_config(directory), _LENGTHS)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.exists():
        raise ArtifactRefused("config.json", "is missing; a GGUF alone must be converted first")
    return read_json_object(path)


def _read_architectures(config: dict[str, Any]) -> list[str]:
    found = config.get("architectures") or []
    if not isinstance(found, list):
        raise ArtifactRefused("config.json", f"architectures is {found!r}, not a list")
    return [str(each) for each in found]


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _first_number(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    """Return the value of the first of `keys` that is a positive number.

    Multimodal models have them in `text_config`. Raises `ArtifactRefused` if there is none.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for value in map(part.get, keys):
            if _is_count(value):
                return value
    raise ArtifactRefused("config.json", f"has none of {', '.join(keys)}")


def _describe_encoder(directory: Path, config: dict[str, Any]) -> ModelDescription:
    return ModelDescription(
        "embed",
        "embed",
        _longest_input(directory, config),
        _first_number(config, ("vocab_size",)),
        embedding_dimensions=_dimensions(directory, config),
    )


def _describe_classifier(directory: Path, config: dict[str, Any]) -> ModelDescription:
    return ModelDescription(
        "classify",
        "classify",
        _longest_input(directory, config),
        _first_number(config, ("vocab_size",)),
        num_labels=_count_labels(config),
    )


def _count_labels(config: dict[str, Any]) -> int:
    labels = config.get("id2label")
    return len(labels) if labels and isinstance(labels, dict) else 2  # transformers' default


def _longest_input(directory: Path, config: dict[str, Any]) -> int:
    """Return the tokens that the model has positions for, or was trained with if that is less."""
    lengths = [_first_number(config, _LENGTHS)]
    if any(kind in str(config.get("model_type")) for kind in _BEHIND_PADDING):
        # These models number their positions from the padding token's id + 1.
        padding = config.get("pad_token_id")
        lengths[0] -= (padding if _is_count(padding) else 1 if padding is None else 0) + 1
    for name, key in _TRAINED_LENGTHS:
        file = directory / name
        if file.exists() and _is_count(limit := read_json_object(file).get(key)):
            lengths.append(limit)
    return min(lengths)


def _dimensions(directory: Path, config: dict[str, Any]) -> int:
    """Return the width of an embedding: of the last dense module, else of the encoder."""
    dense = [_first_number(each, ("out_features",)) for each in _dense_modules(directory)]
    return dense[-1] if dense else _first_number(config, ("hidden_size", "dim", "d_model"))


def _dense_modules(directory: Path) -> Iterator[dict[str, Any]]:
    for module in read_json(directory / "modules.json"):
        if str(module.get("type")).endswith(".Dense"):
            yield read_json_object(directory / str(module.get("path", "")) / "config.json")


def read_chat_template(directory: Path) -> str | None:
    """Return the chat template in chat_template.jinja, else the one in tokenizer_config.json.

    Of several templates there, the one named `default` is returned. None if there is none.
    """
    file = directory / "chat_template.jinja"
    if file.exists():
        return _read_text(file)
    tokenizer = directory / "tokenizer_config.json"
    template = read_json_object(tokenizer).get("chat_template") if tokenizer.exists() else None
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactRefused(file.name, f"is not UTF-8 ({error})") from None

"""Reads a model's engine, task, lengths, vocabulary and chat template from its own files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.artifact_verification import (
    SHORT_DIGEST,
    ArtifactRefused,
    combine_digests,
    hash_files,
    json_reader,
    list_files,
    list_unread_files,
    positive,
    read_json_object,
)
from registry.checkpoints.findings import Finding
from registry.checkpoints.model_types import (
    CLASSIFIES,
    check_architecture,
    complete,
    names_generator,
    read_setting,
    text_settings,
)
from registry.checkpoints.model_weights import check_vector_layers, check_weights
from registry.checkpoints.tokenizer_files import check_template, check_tokenizer
from registry.classifier import check_classifier, count_labels
from registry.generation_config import read_sampling_defaults, warn_of_settings_left_out
from registry.model_folder import check_model_folder
from registry.models import FILE_FACTS, EngineKind, Model, Task, Version
from registry.sentence_encoder import (
    is_sentence_encoder,
    read_text_settings,
    read_vector_modules,
)
from registry.tokenizer.added_tokens import check_token_ids, load_tokenizer
from registry.tokenizer.chat_templates import read_chat_template

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_BEHIND_PADDING = ("roberta", "camembert", "mpnet", "longformer", "data2vec-text")
_WIDTHS = ("hidden_size", "dim", "d_model", "n_embd")


@dataclass(frozen=True)
class ModelDescription:
    """Those fields of the records of a model and its version that follow from files."""

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
    return _describe(directory, _read_config(directory))


def _describe(directory: Path, config: dict[str, Any]) -> ModelDescription:
    architectures = _read_architectures(config)
    pools = is_sentence_encoder(json_reader(directory))
    if any(each.endswith(CLASSIFIES) for each in architectures) and not pools:
        return _describe_classifier(directory, config)
    if (directory / "modules.json").exists():
        return _describe_encoder(directory, config)
    if not any(names_generator(config, each) for each in architectures):
        raise ArtifactRefused(
            "config.json",
            f"architectures {config.get('architectures')} is no causal language model and no "
            "sequence classifier, and there is no modules.json of a sentence encoder",
        )
    read_sampling_defaults(json_reader(directory))  # refuses what no worker would load
    return ModelDescription(
        "transformers",
        "generate",
        _first_number(config, _LENGTHS),
        _first_number(config, ("vocab_size",)),
        chat_template=read_chat_template(directory),
    )


def check_model(directory: Path) -> list[Finding]:
    """Return all that keeps a model's directory from being served, and warnings.

    From headers, config.json and tokeniser files alone: a checkpoint without a finding may still be
    refused by the worker that loads it.
    """
    read = json_reader(directory)
    try:
        check_model_folder(directory)
        list_files(directory)
        config = _read_config(directory)
        described = _describe(directory, config)
        check_architecture(config, described.engine)
        check_token_ids(load_tokenizer(directory, described.vocab_size), read)
    except ArtifactRefused as refused:
        return [Finding(refused.path, refused.reason)]
    return [
        *_warn_of_unread_files(directory),
        *check_weights(directory, config, described.engine),
        *(check_vector_layers(directory) if described.engine == "embed" else ()),
        *(warn_of_settings_left_out(read) if described.engine == "transformers" else ()),
        *check_tokenizer(directory, described.vocab_size, described.chat_template),
        *check_template(directory, described.chat_template),
    ]


def _warn_of_unread_files(directory: Path) -> Iterator[Finding]:
    if unread := list_unread_files(directory):
        more = f", and {len(unread) - 1} more files are not, either" if len(unread) > 1 else ""
        reason = f"is read by no engine, and is no part of the version{more}"
        yield Finding(unread[0], reason, is_refusal=False)


def require_servable(directory: Path) -> list[Finding]:
    """Return the warnings of `check_model`.

    Raises `ArtifactRefused` for its first refusal, with the number of others.
    """
    findings = check_model(directory)
    if refusals := [finding for finding in findings if finding.is_refusal]:
        more = f" (and {len(refusals) - 1} more: millstream models check)" * (len(refusals) > 1)
        raise ArtifactRefused(refusals[0].path, refusals[0].reason + more)
    return findings


def model_from(directory: Path, name: str, version: str | None = None, **fields: Any) -> Model:
    """Return a model's record with one version, which consists of the files in `directory`.

    The version's id is `version` or, by default, the first 12 hex digits of the digest over the
    files. `fields` override what the files say. Raises `ArtifactRefused` for the first refusal of
    `check_model`. Reads and hashes every file: call it in a thread.
    """
    require_servable(directory)
    return make_record(directory, name, version, **fields)


def make_record(directory: Path, name: str, version: str | None = None, **fields: Any) -> Model:
    """Return the record of `model_from` for a directory that `require_servable` has checked."""
    files = hash_files(directory)
    digest = combine_digests(files)
    described = inspect_model(directory)
    made = Version(
        id=version or digest[:SHORT_DIGEST],
        directory=str(directory.resolve()),
        files=files,
        digest=digest,
        **{name: value for name, value in vars(described).items() if name in FILE_FACTS},
    )
    return Model(
        **{"engine": described.engine, "task": described.task, **fields},
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


def _first_number(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    """Return the value of the first of `keys` that is a positive number.

    What config.json leaves out is its type's default; multimodal models have the keys in a part of
    their own. Raises `ArtifactRefused` if there is none.
    """
    for part in (text_settings(config), complete(config)):
        for key in keys:
            if number := positive(read_setting(part, key)):
                return number
    reason = f"has none of {', '.join(keys)}: write the first of them into it"
    raise ArtifactRefused("config.json", reason)


def _describe_encoder(directory: Path, config: dict[str, Any]) -> ModelDescription:
    modules = read_vector_modules(json_reader(directory))
    return ModelDescription(
        "embed",
        "embed",
        _longest_input(directory, config, "embed"),
        _first_number(config, ("vocab_size",)),
        embedding_dimensions=modules.dimensions(_first_number(config, _WIDTHS)),
    )


def _describe_classifier(directory: Path, config: dict[str, Any]) -> ModelDescription:
    check_classifier(config, json_reader(directory))
    return ModelDescription(
        "classify",
        "classify",
        _longest_input(directory, config, "classify"),
        _first_number(config, ("vocab_size",)),
        num_labels=count_labels(config),
    )


def _longest_input(directory: Path, config: dict[str, Any], engine: EngineKind) -> int:
    """Return the tokens that the model has positions for, or was trained with if that is less."""
    length = _first_number(config, _LENGTHS)
    if any(kind in str(config.get("model_type")) for kind in _BEHIND_PADDING):
        # These models number their positions from the padding token's id + 1.
        padding = config.get("pad_token_id")
        length -= (1 if padding is None else positive(padding) or 0) + 1
    trained = read_text_settings(json_reader(directory), engine).max_tokens
    return min(length, trained or _tokenizer_limit(directory) or length)


def _tokenizer_limit(directory: Path) -> int | None:
    """Return the longest input according to tokenizer_config.json; None if it has no such limit."""
    file = directory / "tokenizer_config.json"
    return positive(read_json_object(file).get("model_max_length")) if file.exists() else None

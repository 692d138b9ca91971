"""Reads a classifier's labels and activation, as transformers and sentence-transformers do."""

from collections.abc import Mapping
from typing import Any

from registry.artifact_verification import ArtifactRefused, ReadJson, positive
from registry.sentence_encoder import read_activation, read_reranker_activation

_FILE = "config.json"
_NAMES = "id2label"


def count_labels(config: Mapping[str, Any]) -> int:
    """Return the number of a classifier's labels.

    It is `num_labels`, else the number of names in `id2label`, else 2. Raises `ArtifactRefused` for
    names that are not numbered from 0, and for numbers that are none.
    """
    names, number = config.get(_NAMES), config.get("num_labels")
    if number is not None and positive(number) is None:
        raise ArtifactRefused(_FILE, f"has num_labels {number!r}, which is no number above 0")
    if names is not None and not (isinstance(names, dict) and names):
        raise ArtifactRefused(_FILE, f"has {_NAMES} {names!r}, which names no labels")
    if names is None:
        return positive(number) or 2
    if number is not None and number != len(names):
        return int(number)  # transformers gives other names, then
    if sorted(names) != sorted(map(str, range(len(names)))):
        ids = ", ".join(list(names)[:3])
        reason = f"numbers its {len(names)} labels {ids}, … in {_NAMES}: number them from 0"
        raise ArtifactRefused(_FILE, reason)
    return len(names)


def check_classifier(config: Mapping[str, Any], read: ReadJson) -> None:
    """Raise `ArtifactRefused` for labels, modules or an activation that cannot be served."""
    labels = count_labels(config)
    named_activation(config, read)
    if config.get("problem_type") == "single_label_classification" and labels == 1:
        reason = "single_label_classification needs two labels or more: write regression for one"
        raise ArtifactRefused(_FILE, f"has one label, and problem_type {reason}")


def named_activation(config: Mapping[str, Any], read: ReadJson) -> str | None:
    """Return the activation that a cross-encoder's files name; None if they name none.

    `read` reads those beside config.json, which come first. Raises `ArtifactRefused` for an unknown
    one.
    """
    if newer := read_reranker_activation(read):
        return newer
    settings = config.get("sentence_transformers") or {}
    if not isinstance(settings, dict):
        raise ArtifactRefused(_FILE, f"sentence_transformers is {settings!r}, not an object")
    path = settings.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    return read_activation(path, _FILE) if path else None

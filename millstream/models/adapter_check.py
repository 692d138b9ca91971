"""The report of `millstream models check` on a LoRA adapter and the directory of its model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from registry.artifact_verification import ArtifactRefused
from registry.lora_inspection import check_engine, count_parameters, list_targets, read_adapter
from registry.model_folder import check_model_folder
from registry.model_inspection import inspect_model


def make_adapter_report(directory: Path, base: Path) -> dict[str, Any]:
    """Return what is said of the adapter in `directory`, trained on the model in `base`.

    Of the model only what an adapter needs is checked.
    """
    report: dict[str, Any] = {
        "directory": str(directory),
        "adapter_of": str(base),
        "servable": True,
        "rank": None,
        "parameters": None,
        "targets": [],
        "refusals": [],
        "warnings": [],
    }
    try:
        _check_base(directory, base)
        pairs = read_adapter(directory, base)
    except ArtifactRefused as refused:
        refusal = {"path": refused.path, "reason": refused.reason}
        return {**report, "servable": False, "refusals": [refusal]}
    rank = max(pair.rank for pair in pairs.values())
    found = {"parameters": count_parameters(pairs), "targets": list_targets(pairs)}
    return {**report, "rank": rank, **found}


def _check_base(directory: Path, base: Path) -> None:
    """Raise `ArtifactRefused` if `base` is no model that serves adapters."""
    check_model_folder(base)
    try:
        engine = inspect_model(base).engine
    except ArtifactRefused as refused:
        raise ArtifactRefused(str(base / refused.path), refused.reason) from None
    check_engine(directory, str(base), engine)


def adapter_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that say the same to a reader."""
    facts = ""
    if report["servable"]:
        targets = ", ".join(report["targets"])
        facts = f", rank {report['rank']}, {report['parameters']:,} numbers, on {targets}"
    yield f"{report['directory']}: LoRA of {report['adapter_of']}{facts}"
    for each in report["refusals"]:
        yield f"refusal  {each['path']}: {each['reason']}"

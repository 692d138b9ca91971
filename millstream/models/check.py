"""The command `millstream models check`: all that `models add` would refuse, and what it costs."""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich import print_json

from gpu_worker.engines import factory
from gpu_worker.engines.engine import MemoryEstimate
from millstream.admin.console_output import print_sentences
from millstream.models.adapter_check import adapter_lines, make_adapter_report
from millstream.models.settings import CheckSettings
from registry.artifact_verification import ArtifactRefused
from registry.checkpoints.findings import Finding
from registry.model_inspection import ModelDescription, check_model, inspect_model


async def check(settings: CheckSettings, stop: asyncio.Event) -> int:
    """Print what is wrong with a model's or an adapter's directory, and what it would take.

    Nothing is registered and no weights are read. Returns the exit status: 1 if `models add` would
    refuse the directory, else 0.
    """
    if settings.adapter_of:
        report = await asyncio.to_thread(make_adapter_report, settings.path, settings.adapter_of)
        lines = adapter_lines(report)
    else:
        report = await asyncio.to_thread(_make_report, settings)
        lines = _lines(report)
    if settings.as_json:
        print_json(data=report)
    else:
        print_sentences("\n".join(lines))
    return 1 if report["refusals"] else 0


def _make_report(settings: CheckSettings) -> dict[str, Any]:
    """Return the report as it is printed with `--json`."""
    findings = check_model(settings.path)
    refusals = [_finding(each) for each in findings if each.is_refusal]
    described = _describe(settings.path)
    estimate = _estimate(settings, described) if described and not refusals else None
    return {
        "directory": str(settings.path),
        "servable": not refusals,
        "engine": described and described.engine,
        "task": described and described.task,
        "context_length": described and described.context_length,
        "refusals": refusals,
        "warnings": [_finding(each) for each in findings if not each.is_refusal],
        "memory": estimate and vars(estimate),
    }


def _finding(finding: Finding) -> dict[str, str]:
    return {"path": finding.path, "reason": finding.reason}


def _describe(directory: Path) -> ModelDescription | None:
    try:
        return inspect_model(directory)
    except (ArtifactRefused, OSError):
        return None


def _estimate(settings: CheckSettings, described: ModelDescription) -> MemoryEstimate | None:
    if not find_spec("torch"):
        return None
    return factory.estimate_memory(
        settings.path,
        described.engine,
        settings.max_sequences,
        settings.max_batch_tokens,
        settings.memory,
    )


def _lines(report: dict[str, Any]) -> Iterator[str]:
    context = f", context {report['context_length']:,}" if report["task"] else ""
    yield f"{report['directory']}: {report['task'] or 'of no known kind'}{context}"
    for level in ("refusals", "warnings"):
        for each in report[level]:
            yield f"{level[:-1]:<8} {each['path']}: {each['reason']}"
    if report["memory"]:
        yield from _memory_lines(report["memory"])
    elif report["servable"]:
        yield "memory   not estimated without torch: pip install 'millstream[worker]'"


def _memory_lines(memory: dict[str, Any]) -> Iterator[str]:
    weights, device = _size(memory["weight_bytes"]), memory["device"]
    yield f"weights  {weights} once loaded, {memory['dtype']} on the {device}"
    if memory["kv_bytes_per_token"] is not None:
        a_token = _size(memory["kv_bytes_per_token"])
        a_thousand = _size(memory["kv_bytes_per_1000_tokens"])
        yield f"KV       {a_token} a token, {a_thousand} for a sequence of 1,000"
        yield f"fits     about {memory['kv_tokens']:,} tokens of all sequences together"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"

"""Writes a sweep's results: tables in docs/models.md, and what the registry refuses by them."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import transformers

from registry.checkpoints.model_types import REFUSED_FILE
from tests.engine.sweep.causal import Result

DOCUMENT = Path(__file__).parents[3] / "docs/models.md"
OUTCOMES = ("equal", "refused", "not built", "wrong")
MARK = "<!-- {name}: written by make sweep -->"
_OWN_WORDS = re.compile(r"^.* cannot run on this engine: |; serve it by a remote .*$")
_HAS = "it has "
_PATHS = re.compile(r" (in|for) '?/[^\s']+'?")
_NUMBERS = re.compile(r"\d[\d.e+-]*")
REASON_CHARACTERS = 120


def to_table(results: Iterable[Result]) -> str:
    """Return a table of results: a row for all that are equal, then one for each reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in merge(results):
        rows.setdefault((result.outcome, shorten(result)), []).append(result.architecture)
    lines = ["| result | number | architectures |", "|---|---|---|"]
    for outcome, reason in sorted(rows, key=lambda row: (OUTCOMES.index(row[0]), row[1])):
        names = sorted(rows[outcome, reason])
        label = f"{outcome}: {reason}" if reason else outcome
        lines.append(f"| {label} | {len(names)} | {', '.join(names)} |")
    return "\n".join(lines)


def merge(results: Iterable[Result]) -> list[Result]:
    """Return one result for each architecture: the worst of those of its configurations."""
    worst: dict[str, Result] = {}
    for result in results:
        known = worst.get(result.architecture)
        if not known or OUTCOMES.index(result.outcome) > OUTCOMES.index(known.outcome):
            worst[result.architecture] = result
    return list(worst.values())


def shorten(result: Result) -> str:
    """Return the reason as `generalise` does, short enough for a table's cell."""
    return generalise(result).removeprefix(_HAS)[:REASON_CHARACTERS].replace("|", "/")


def generalise(result: Result) -> str:
    """Return the reason without the architecture's name, numbers, and what all refusals say.

    Of what other people's code says about a model that is not built, it is the first sentence.
    """
    reason = _PATHS.sub("", _OWN_WORDS.sub("", " ".join(result.reason.split())))
    return _NUMBERS.sub("…", reason) if result.outcome == "refused" else reason.partition(". ")[0]


def write(tables: Mapping[str, str], document: Path = DOCUMENT) -> None:
    """Replace the text between the marks of each table in a document; raises if there are none."""
    text = document.read_text()
    for name, table in tables.items():
        mark = MARK.format(name=name)
        before, _, after = text.split(mark)
        text = f"{before}{mark}\n{table}\n{mark}{after}"
    document.write_text(text)


def write_refused(results: Iterable[Result], file: Path = REFUSED_FILE) -> None:
    """Write the architectures that workers refuse for what config.json does not show."""
    refused = {
        result.architecture: generalise(result)
        for result in sorted(merge(results), key=lambda each: each.architecture)
        if result.outcome == "refused" and not result.is_declared
    }
    content = {"transformers": transformers.__version__, "architectures": refused}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

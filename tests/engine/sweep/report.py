"""The table of a sweep's results in docs/models.md, between two marks."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.engine.sweep.causal import Result

DOCUMENT = Path(__file__).parents[3] / "docs/models.md"
OUTCOMES = ("equal", "refused", "not built", "wrong")
MARK = "<!-- {name}: written by make sweep -->"
_OWN_WORDS = re.compile(r"^.* cannot run on this engine: (it has )?|; serve it by a remote .*$")
_PATHS = re.compile(r" in /\S+")
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
    """Return the reason without the architecture's name, numbers, and what all refusals say."""
    reason = _PATHS.sub("", _OWN_WORDS.sub("", " ".join(result.reason.split())))
    if result.outcome == "refused":
        reason = _NUMBERS.sub("…", reason)
    return reason[:REASON_CHARACTERS].replace("|", "/")


def write(tables: Mapping[str, str], document: Path = DOCUMENT) -> None:
    """Replace the text between the marks of each table in a document; raises if there are none."""
    text = document.read_text()
    for name, table in tables.items():
        mark = MARK.format(name=name)
        before, _, after = text.split(mark)
        text = f"{before}{mark}\n{table}\n{mark}{after}"
    document.write_text(text)

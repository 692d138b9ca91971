"""Publishes the runs of a measurement: a table with medians for people, and a file of results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench import machine_info

DIRECTORY = Path(__file__).parent / "results"

Run = Mapping[str, float]


@dataclass(frozen=True)
class Figure:
    """A measured value: its key in a run, its description in the table, and its goal, if any."""

    key: str
    words: str
    goal: str = ""


def publish(
    name: str,
    setting: Mapping[str, object],
    figures: Sequence[Figure],
    runs: Sequence[Run],
    directory: Path = DIRECTORY,
) -> None:
    """Print all runs with their medians, and write these with the machine's description to a file.

    The file is `<name>-<date>.json` in `directory`.
    """
    medians = {figure.key: median(run[figure.key] for run in runs) for figure in figures}
    Console().print(_table(name, figures, runs, medians))
    content = {
        "name": name,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_info.describe_machine(),
        "setting": setting,
        "medians": medians,
        "goals": {figure.key: figure.goal for figure in figures if figure.goal},
        "runs": runs,
    }
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    Console(soft_wrap=True).print(f"written to {path}")


def _table(
    name: str, figures: Sequence[Figure], runs: Sequence[Run], medians: Mapping[str, float]
) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("")
    for number in range(len(runs)):
        table.add_column(f"run {number + 1}", justify="right")
    table.add_column("median", justify="right")
    table.add_column("goal")
    for figure in figures:
        values = [*(run[figure.key] for run in runs), medians[figure.key]]
        table.add_row(figure.words, *(f"{value:,.2f}" for value in values), figure.goal)
    return table

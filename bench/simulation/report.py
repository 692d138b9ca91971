"""Reports values of several seeds, their median and the worst: a table and a JSON file."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import median

from rich.table import Table

from bench import machine_info
from bench.simulation.scenario import Figure, Scenario, Setting, Values

OURS = "millstream"


@dataclass(frozen=True)
class Measured:
    """A scenario and its values for each seed."""

    scenario: Scenario
    seeds: Sequence[Values]

    @property
    def systems(self) -> list[str]:
        """The names of the systems, in the order of their first appearance."""
        return list(dict.fromkeys(name for values in self.seeds for name in values))

    def values_of(self, system: str, figure: Figure) -> list[float]:
        """A system's values of a figure, of the seeds that have one."""
        rows = (values.get(system, {}) for values in self.seeds)
        return [row[figure.key] for row in rows if figure.key in row]


class SimulationReport:
    """Collects measured scenarios; writes them with the machine, the date and the command."""

    def __init__(self, arguments: Sequence[str], setting: Setting) -> None:
        self.measured: list[Measured] = []
        self._arguments, self._setting = arguments, setting
        self._began = time.perf_counter()

    def add(self, scenario: Scenario, seeds: Sequence[Values]) -> Measured:
        """Add a scenario's values, one mapping for each seed."""
        self.measured.append(Measured(scenario, seeds))
        return self.measured[-1]

    def write(self, path: Path) -> None:
        """Write everything as JSON, with an end of line."""
        content = {
            "name": "simulation",
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m bench.simulate", *self._arguments]),
            "machine": machine_info.describe_machine(),
            "took_seconds": round(time.perf_counter() - self._began, 1),
            "worker": asdict(self._setting.worker),
            "scenarios": {each.scenario.name: _content(each) for each in self.measured},
        }
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _content(measured: Measured) -> dict[str, object]:
    figures = measured.scenario.figures
    return {
        "words": measured.scenario.words,
        "goals": {each.key: each.goal for each in figures if each.goal is not None},
        "known": {each.key: each.known for each in figures if each.known},
        "median": _summary(measured, lambda figure, values: median(values)),
        "worst": _summary(measured, lambda figure, values: figure.worst(values)),
        "seeds": [{name: _plain(row) for name, row in seed.items()} for seed in measured.seeds],
    }


def _summary(
    measured: Measured, combine: Callable[[Figure, Sequence[float]], float]
) -> dict[str, dict[str, float | None]]:
    figures = measured.scenario.figures
    return {
        system: _plain(
            {
                f.key: combine(f, values)
                for f in figures
                if (values := measured.values_of(system, f))
            }
        )
        for system in measured.systems
    }


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    """The values for JSON, which has no infinity: null stands for it."""
    return {key: value if isfinite(value) else None for key, value in values.items()}


def table(measured: Measured) -> Table:
    """A table of a scenario: a row for each figure, a column for each system."""
    scenario = measured.scenario
    grid = Table(title=f"{scenario.name}  {scenario.words}", title_justify="left")
    grid.add_column("")
    for name in measured.systems:
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("goal", no_wrap=True)
    grid.add_column("elsewhere")
    for figure in scenario.figures:
        cells = [_cell(figure, measured.values_of(name, figure)) for name in measured.systems]
        grid.add_row(
            figure.words, *cells, _goal(figure, measured.values_of(OURS, figure)), figure.known
        )
    return grid


def _cell(figure: Figure, found: Sequence[float]) -> str:
    if not found:
        return ""
    middle = _number(median(found))
    return middle if len(found) == 1 else f"{middle} ({_number(figure.worst(found))})"


def _goal(figure: Figure, ours: Sequence[float]) -> str:
    if figure.goal is None:
        return ""
    sign = "≤" if figure.better == "lower" else "≥"
    met = bool(ours) and figure.met(figure.worst(ours))
    return f"{sign} {_number(figure.goal)} {'✓' if met else '✗'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

"""Values of several seeds to a table for people: the median, and the worst."""

from collections.abc import Mapping, Sequence
from statistics import median

from rich.table import Table

from bench.simulation.scenario import Figure, Scenario, Values

OURS = "millstream"


def table(scenario: Scenario, seeds: Sequence[Values]) -> Table:
    """A row for each figure, a column for each system."""
    grid = Table(title=f"{scenario.name}  {scenario.words}", title_justify="left")
    grid.add_column("")
    systems = list(dict.fromkeys(name for values in seeds for name in values))
    for name in systems:
        grid.add_column(name, justify="right")
    for words in ("goal", "known"):
        grid.add_column(words)
    for figure in scenario.figures:
        cells = [_cell(figure, [values.get(name, {}) for values in seeds]) for name in systems]
        grid.add_row(figure.words, *cells, _goal(figure, seeds), figure.known)
    return grid


def _cell(figure: Figure, seeds: Sequence[Mapping[str, float]]) -> str:
    found = [values[figure.key] for values in seeds if figure.key in values]
    if not found:
        return ""
    middle, worst = median(found), figure.worst(found)
    return _number(middle) if len(found) == 1 else f"{_number(middle)} ({_number(worst)})"


def _goal(figure: Figure, seeds: Sequence[Values]) -> str:
    if figure.goal is None:
        return ""
    found = [values[OURS][figure.key] for values in seeds if figure.key in values.get(OURS, {})]
    met = bool(found) and figure.met(figure.worst(found))
    return (
        f"{'≤' if figure.better == 'lower' else '≥'} {_number(figure.goal)} {'✓' if met else '✗'}"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

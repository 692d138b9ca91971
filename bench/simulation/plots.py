"""Draws measured scenarios: a row for each, bars by system, the seeds as dots."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.simulation.report import Measured
from bench.simulation.scenario import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCHES = (3.4, 2.9)  # of each axes
LOGARITHMIC = 100.0  # a larger ratio of the largest to the smallest bar gets a log scale


def draw(path: Path, rows: Sequence[Measured]) -> None:
    """Write a PNG with a row of axes for each measured scenario. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    columns = max(len(_panels(row)) for row in rows)
    size = (INCHES[0] * columns, INCHES[1] * len(rows))
    canvas = Canvas(figsize=size, layout="constrained")
    FigureCanvasAgg(canvas)
    grid = canvas.subplots(len(rows), columns, squeeze=False)
    systems = list(dict.fromkeys(system for row in rows for system in row.systems))
    colours = {system: f"C{number}" for number, system in enumerate(systems)}
    for row, axes in zip(rows, grid, strict=True):
        for spare in axes[len(_panels(row)) :]:
            spare.set_axis_off()
        for panel, axis in zip(_panels(row), axes, strict=False):
            _draw(axis, row, panel, colours)
    canvas.savefig(path, format="png", dpi=100)


def _panels(row: Measured) -> list[list[Figure]]:
    """The figures by axes: those of one curve share axes, every other figure has its own."""
    curve = [figure for figure in row.scenario.figures if figure.x is not None]
    alone = [[figure] for figure in row.scenario.figures if figure.x is None]
    return [curve, *alone] if curve else alone


def _draw(axes: "Axes", row: Measured, panel: list[Figure], colours: Mapping[str, str]) -> None:
    if len(panel) > 1:
        _curve(axes, row, panel, colours)
    else:
        _bars(axes, row, panel[0], colours)
    for goal in {figure.goal for figure in panel if figure.goal is not None}:
        axes.axhline(goal, linewidth=0.8, linestyle="--", color="black")
    axes.grid(visible=True, axis="y", alpha=0.2)
    axes.tick_params(labelsize=7)


def _curve(axes: "Axes", row: Measured, panel: list[Figure], colours: Mapping[str, str]) -> None:
    for system in row.systems:
        points = [(f.x, median(found)) for f in panel if (found := row.values_of(system, f))]
        xs, ys = [x for x, _ in points if x is not None], [y for _, y in points]
        axes.plot(xs, ys, marker="o", markersize=3, label=system, color=colours[system])
    axes.set_title(f"{row.scenario.name}: over the load", fontsize=8)
    axes.set(xscale="log", ylim=(0, None))
    axes.set_xlabel("times the capacity", fontsize=7)
    axes.legend(fontsize=6)


def _bars(axes: "Axes", row: Measured, figure: Figure, colours: Mapping[str, str]) -> None:
    found = {system: values for system in row.systems if (values := row.values_of(system, figure))}
    finite = {name: [v for v in values if v < float("inf")] for name, values in found.items()}
    heights = [median(values) if values else 0.0 for values in finite.values()]
    axes.bar(list(finite), heights, color=[colours[name] for name in finite])
    for name, values in finite.items():
        axes.scatter([name] * len(values), values, s=6, color="black", zorder=3)
        if len(values) < len(found[name]):
            axes.annotate("∞", (name, 0.9), xycoords=("data", "axes fraction"), ha="center")
    positive = [height for height in heights if height > 0]
    if positive and max(positive) > LOGARITHMIC * min(positive):
        axes.set_yscale("log")
    axes.set_title(f"{row.scenario.name}: {figure.words}", fontsize=8, wrap=True)

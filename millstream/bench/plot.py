"""Draws a load's times to first token and between tokens, as distributions and over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.bench.load_statistics import Sample
from streams.errors import MillstreamError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 20_000  # at most in one plot; more would hide each other


class PlotUnavailable(MillstreamError):
    """The plotting library matplotlib is not installed."""

    code = "plot_unavailable"


def require_matplotlib() -> None:
    """Raise `PlotUnavailable` if matplotlib is not installed; otherwise do nothing.

    To be called before the load, so that a missing library does not fail the plot after it.
    """
    try:
        import matplotlib  # noqa: F401  # imported only to check that it is installed
    except ImportError:
        raise PlotUnavailable("--plot needs matplotlib: pip install 'millstream[bench]'") from None


def draw_plot(path: Path, samples: Sequence[Sample], began: float) -> None:
    """Write a PNG file to `path` with plots of the latencies of a load's completed requests.

    The plots show the time to first token and the time between tokens, each as a distribution and
    over time. `began` is the time at the start of the load, in seconds of the samples' clock. If no
    request was completed, the plots are empty. An existing file is replaced. Needs matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    completed = [sample for sample in samples if sample.is_ok and sample.times]
    firsts = [(s.due - began, (s.times[0] - s.due) * 1000) for s in completed]
    gaps = [
        (t - began, gap * 1000)
        for s in completed
        for t, gap in zip(s.times[1:], s.gaps(), strict=True)
    ]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2)
    for row, name, points in ((0, "time to first token", firsts), (1, "inter-token time", gaps)):
        _draw_distribution(grid[row][0], name, [ms for _, ms in points])
        _draw_over_time(grid[row][1], name, points)
    figure.savefig(path, format="png", dpi=110)


def _draw_distribution(axes: "Axes", name: str, values: list[float]) -> None:
    """Plot the cumulative distribution of `values` (ms)."""
    ordered = sorted(values)
    step = max(1, len(ordered) // POINTS)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    axes.plot(ordered[::step], shares[::step])
    axes.set(title=name, xlabel="ms", ylabel="share", ylim=(0, 1.02))
    for q in (0.5, 0.95, 0.99):
        axes.axhline(q, linewidth=0.6, linestyle=":", color="grey")
    axes.grid(visible=True, alpha=0.2)


def _draw_over_time(axes: "Axes", name: str, points: list[tuple[float, float]]) -> None:
    thinned = points[:: max(1, len(points) // POINTS)]
    axes.scatter([t for t, _ in thinned], [ms for _, ms in thinned], s=4, alpha=0.4, linewidths=0)
    axes.set(title=f"{name} over time", xlabel="s since the start", ylabel="ms", ylim=(0, None))
    axes.grid(visible=True, alpha=0.2)

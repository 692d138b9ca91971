"""Measures the parts of an engine's step."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from gpu_worker.engines.engine_stats import EngineStats, StepPart


@contextmanager
def measure(stats: EngineStats, part: StepPart) -> Iterator[None]:
    """Add the seconds that the `with` block takes to one part of the step in `stats`.

    A block that raises is counted, too.
    """
    started = perf_counter()
    try:
        yield
    finally:
        stats.add_seconds(part, perf_counter() - started)

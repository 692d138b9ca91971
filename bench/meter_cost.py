"""Measures what it costs an engine's step to be divided over its requests, in CPU time."""

import time

from bench import reporting
from bench.reporting import Figure, Run
from gpu_worker.compute_meter import ComputeMeter

STEPS = 5000
SEQUENCES = (1, 64, 256)
FIGURES = tuple(
    Figure(f"us_{count}", f"µs of CPU for a step of {count} sequences") for count in SEQUENCES
)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, and publish; `seconds` has no effect."""
    found = [{f"us_{count}": _measure(count) for count in SEQUENCES} for _ in range(runs)]
    reporting.publish("meter", {"steps": STEPS}, FIGURES, list[Run](found))


def _measure(sequences: int) -> float:
    meter = ComputeMeter(["m"], time.monotonic_ns()).of_model("m")
    tokens = {f"{number:032x}": 1 for number in range(sequences)}
    began = time.process_time()
    for _ in range(STEPS):
        meter.begin_step()
        meter.end_step(tokens)
    return (time.process_time() - began) / STEPS * 1e6

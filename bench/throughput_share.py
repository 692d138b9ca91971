"""Measures how much of an engine's speed remains behind the pipeline: tokens/s with and without it.

Both run with 32 sequences of 64 prompt and 32 output tokens at once, one after the other, several
times; the figure is the ratio of the medians.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench import bench_command, reporting
from bench.reporting import Figure, Run
from gpu_worker.engines import demo_models
from millstream.up.demo_conversion_process import cache_directory
from millstream.up.launch_plan import ALLOCATOR_ENVIRONMENT
from tests.support.millstream_up import KEY, MillstreamUp

MODEL = "gemma-3-270m"
SEQUENCES, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 32

FIGURES = (
    Figure("through_tokens_per_second", "tokens/s through the pipeline"),
    Figure("direct_tokens_per_second", "tokens/s of the engine alone"),
    Figure("share", "share", "≥ 0.9"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure both in turn, each in fresh processes, and publish."""
    directory = demo_models.find_model(MODEL, cache_directory(), lambda stage, done: None)
    through, direct = [], []
    for _ in range(runs):
        direct.append(_direct(directory, seconds))
        through.append(_through(directory, seconds))
    setting = {
        "model": MODEL,
        "sequences": SEQUENCES,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "seconds": seconds,
        "share_of_medians": median(through) / median(direct),
    }
    reporting.publish("engine_share", setting, FIGURES, list(map(_pair, through, direct)))
    print(f"share of the medians: {setting['share_of_medians']:.3f}")


def _pair(through: float, direct: float) -> Run:
    return {
        "through_tokens_per_second": through,
        "direct_tokens_per_second": direct,
        "share": through / direct,
    }


def _through(directory: Path, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as home:
        with MillstreamUp(Path(home), "--model", str(directory), "--api-key", KEY) as up:
            up.wait_until_ready()
            report = bench_command.measure_up(
                up,
                *("--concurrency", str(SEQUENCES), "--duration", str(seconds)),
                *("--prompt-tokens", str(PROMPT_TOKENS)),
                *("--output-tokens", str(OUTPUT_TOKENS)),
            )
            return float(report["tokens_per_second"])


def _direct(directory: Path, seconds: float) -> float:
    """The tokens/s of the engine alone, built as in a worker and with a worker's allocator."""
    sizes = map(str, (SEQUENCES, PROMPT_TOKENS, OUTPUT_TOKENS))
    command = [sys.executable, "-m", "bench.engine_alone", str(directory), str(seconds), *sizes]
    environment = {**os.environ, **ALLOCATOR_ENVIRONMENT}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(json.loads(done.stdout)["tokens_per_second"])

"""Compares our engine with others by generated tokens per second.

Prefill is included, and all prompts are added at once.

Contenders take turns, each turn in a fresh process that warms up first, configured as their users
have them: ours with a worker's allocator, vLLM with the OpenMP runtime that its documentation
advises. vLLM takes part if MILLSTREAM_BENCH_VLLM names the Python of an environment that has it: as
the reference figures were taken (`--enforce-eager`), and with its layers compiled, which needs a
C++ compiler.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import reporting
from bench.reporting import Figure, Run
from bench.synthetic_models import small_llama
from gpu_worker.engines import demo_models
from millstream.up.demo_conversion_process import cache_directory
from millstream.up.launch_plan import ALLOCATOR_ENVIRONMENT

OURS = "millstream"
VLLM = {"vllm": 0.9, "vllm_compiled": None}  # with the share of its rate that is our goal
VLLM_PYTHON = "MILLSTREAM_BENCH_VLLM"
ROUNDS = 2  # in one turn


@dataclass(frozen=True)
class Case:
    """A workload, with our goal as a share of each contender's rate (None: no goal)."""

    model: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    goals: dict[str, float | None]

    @property
    def name(self) -> str:
        return f"{self.model}-p{self.prompt_tokens}-n{self.output_tokens}-c{self.concurrency}"


CASES = (
    Case("llama-28m-fp32", 64, 64, 32, VLLM | {"generate": 1.2}),
    Case("llama-28m-fp32", 512, 32, 32, VLLM),
    Case("gemma-3-270m-bf16", 64, 32, 32, VLLM),
)


def measure(runs: int, seconds: float) -> None:
    """Measure every case and publish a table for each; `seconds` has no effect here."""
    with tempfile.TemporaryDirectory() as home:
        directories = {
            "llama-28m-fp32": small_llama(Path(home) / "llama"),
            "gemma-3-270m-bf16": demo_models.find_model("gemma-3-270m", cache_directory()),
        }
        for case in CASES:
            _publish(case, [_turn(case, directories[case.model]) for _ in range(runs)])


def _publish(case: Case, runs: list[Run]) -> None:
    names = _contenders(case)
    figures = [
        *(Figure(name, f"tokens/s, {name}") for name in names),
        *(Figure(f"over_{n}", f"share of {n}", _at_least(case.goals[n])) for n in names[1:]),
    ]
    shares = {
        f"over_{name}": median(r[OURS] for r in runs) / median(r[name] for r in runs)
        for name in names[1:]
    }
    reporting.publish(
        f"engine-{case.name}", {**vars(case), "shares_of_medians": shares}, figures, runs
    )


def _at_least(goal: float | None) -> str:
    return "" if goal is None else f"≥ {goal}"


def _turn(case: Case, directory: Path) -> Run:
    """One turn of each contender: the best of its rounds, which other processes disturbed least."""
    rates = {name: max(_rounds(case, directory, name)) for name in _contenders(case)}
    return rates | {f"over_{name}": rates[OURS] / rates[name] for name in rates if name != OURS}


def _contenders(case: Case) -> list[str]:
    """Our engine, and those of the case's contenders that are installed."""
    return [OURS, *(name for name in case.goals if name not in VLLM or VLLM_PYTHON in os.environ)]


def _rounds(case: Case, directory: Path, name: str) -> list[float]:
    sizes = (case.prompt_tokens, case.output_tokens, case.concurrency, ROUNDS)
    python = os.environ[VLLM_PYTHON] if name in VLLM else sys.executable
    command = [python, "-m", f"bench.contenders.{name}", str(directory), *map(str, sizes)]
    own = {OURS: ALLOCATOR_ENVIRONMENT} | dict.fromkeys(VLLM, _vllm(Path(python)))
    environment = {**os.environ, **own.get(name, {}), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    rates: list[float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def _vllm(python: Path) -> dict[str, str]:
    """vLLM's environment; the last entry is Intel's OpenMP, which its wheel contains."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"),
    }

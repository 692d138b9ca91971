"""What the figures share: four workers, each an A10G with a 7B model of twice the speed."""

import os
from pathlib import Path

from bench.simulation import runs
from bench.simulation.loads import Load
from bench.simulation.runs import Outcome
from bench.simulation.step_model import StepModel
from bench.simulation.systems import Build, Millstream, Plant

GATEWAYS, WORKERS, FASTER = 2, 4, 2
WORKER = StepModel().faster(FASTER)
TRACES = Path(os.environ.get("MILLSTREAM_BENCH_TRACES", "traces"))
PROCESSES = ("gateway", "dispatcher", "worker", "nats", "bench")


def described(seconds: float) -> dict[str, object]:
    """For a file of results."""
    return {
        "seconds": seconds,
        "workers": WORKERS,
        "gateways": GATEWAYS,
        "worker": f"bench/simulation/step_model.py, {FASTER} times as fast",
    }


def simulated(load: Load, drain_seconds: float, build: Build = Millstream) -> Outcome:
    """The same load in the simulator, on a plant like the running one."""
    plant = Plant((WORKER,) * WORKERS, GATEWAYS)
    return runs.Run(build, plant, load).run(drain_seconds)

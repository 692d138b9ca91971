"""What the figures share: four workers, each an A10G with a 7B model of twice the speed."""

import os
from pathlib import Path

from bench.simulation import runs
from bench.simulation.runs import Outcome
from bench.simulation.systems import Build, Millstream, SimulatedCluster
from bench.simulation.workloads import Workload
from simulation.step_model import StepModel

GATEWAYS, WORKERS, FASTER = 2, 4, 2
WORKER = StepModel().speed_up(FASTER)
TRACES = Path(os.environ.get("MILLSTREAM_BENCH_TRACES", "traces"))
PROCESSES = ("gateway", "dispatcher", "worker", "nats", "bench")


def describe_setting(seconds: float) -> dict[str, object]:
    """For a file of results."""
    return {
        "seconds": seconds,
        "workers": WORKERS,
        "gateways": GATEWAYS,
        "worker": f"simulation/step_model.py, {FASTER} times as fast",
    }


def run_simulated(load: Workload, drain_seconds: float, build: Build = Millstream) -> Outcome:
    """The same load in the simulator, on a plant like the running one."""
    plant = SimulatedCluster((WORKER,) * WORKERS, GATEWAYS)
    return runs.SimulationRun(build, plant, load).run(drain_seconds)

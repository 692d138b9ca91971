"""The setting of live measurements: four workers, each an A10G with a 7B model, twice as fast."""

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
    """Return the setting, as written to result files."""
    return {
        "seconds": seconds,
        "workers": WORKERS,
        "gateways": GATEWAYS,
        "worker": f"simulation/step_model.py, {FASTER} times as fast",
    }


def run_simulated(load: Workload, drain_seconds: float, build: Build = Millstream) -> Outcome:
    """Run a load in the simulator, on a cluster like the running one, and return its outcome."""
    cluster = SimulatedCluster((WORKER,) * WORKERS, GATEWAYS)
    return runs.SimulationRun(build, cluster, load).run(drain_seconds)

"""The simulator's own speed: a thousand workers at the edge of their capacity."""

import time
from random import Random

from bench.simulation import measures, workloads
from bench.simulation.runs import SimulationRun, capacity
from bench.simulation.scenario import Figure, Scenario, Setting, Values
from bench.simulation.systems import Millstream, SimulatedCluster
from bench.simulation.workloads import Workload
from simulation.request import RequestSpec

SECONDS = 20.0
WORKERS = 1000
LOAD = 0.75  # of the capacity
TENANTS = 100
PROMPT, OUTPUT = 256, 256


def measure(setting: Setting, seed: int) -> Values:
    """Simulate 20 s of a thousand workers and measure the CPU time that it takes."""
    random = Random(seed)
    spec = RequestSpec(0, "", PROMPT, OUTPUT)
    rate = LOAD * WORKERS * capacity(setting.worker, (spec,) * 100)
    arrivals = workloads.poisson(spec, rate, SECONDS, random)
    named = workloads.by_tenants(arrivals, TENANTS, random)
    began = time.process_time()
    cluster = SimulatedCluster((setting.worker,) * WORKERS)
    outcome = SimulationRun(Millstream, cluster, Workload(list(named), SECONDS)).run(60.0)
    took = time.process_time() - began
    return {
        "millstream": {
            "speed": outcome.ended / took,
            "events": outcome.events / took,
            "p99": measures.first_token_percentile(outcome.requests, 0.99),
        }
    }


SCENARIOS = (
    Scenario(
        "scale",
        f"the simulator: {WORKERS:,} workers at {LOAD:.0%} of their capacity",
        (
            Figure("speed", "simulated seconds per second of CPU", None, "higher"),
            Figure("events", "events per second of CPU", None, "higher"),
            Figure("p99", "p99 to first token, s"),
        ),
        measure,
    ),
)

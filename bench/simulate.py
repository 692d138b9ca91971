"""`python -m bench.simulate [SCENARIO…]`: the scheduler's own code on a virtual clock.

Runs each scenario with every seed, for Millstream and for baselines under the same load, and prints
the median and, in brackets, the worst of the seeds.
"""

import argparse
import time

from rich.console import Console

from bench.simulation import affinity, fairness, isolation, mixture, overload
from bench.simulation.engine import StepModel
from bench.simulation.scenario import Setting
from bench.simulation.tables import table

SCENARIOS = {
    each.name: each
    for each in (
        *fairness.SCENARIOS,
        *isolation.SCENARIOS,
        *overload.SCENARIOS,
        *mixture.SCENARIOS,
        *affinity.SCENARIOS,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="SCENARIO", help="or the start of its name")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--traces", default="/work/shared/traces")
    words = parser.parse_args()
    setting = Setting(StepModel(), words.traces)
    chosen = [
        scenario
        for name, scenario in SCENARIOS.items()
        if not words.what or any(name.startswith(start) for start in words.what)
    ]
    for scenario in chosen:
        began = time.perf_counter()
        seeds = [scenario.measure(setting, seed) for seed in range(words.seeds)]
        Console(width=140).print(table(scenario, seeds))
        print(f"{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()

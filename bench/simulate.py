"""`python -m bench.simulate [SCENARIO…]`: the scheduler's own code on a virtual clock.

Runs each scenario with every seed, for Millstream and for baselines under the same load, and prints
the median and, in brackets, the worst of the seeds.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from bench.simulation import plots
from bench.simulation.report import SimulationReport, table
from bench.simulation.scenario import Scenario, Setting
from bench.simulation.scenarios import (
    fairness,
    isolation,
    mixed_priorities,
    overload,
    prefix_affinity,
    simulator_speed,
)
from millstream.bench import plot
from simulation.step_model import StepModel

WIDTH = 120  # columns where the output is no terminal
TRACES = "MILLSTREAM_BENCH_TRACES"
SCENARIOS: tuple[Scenario, ...] = (
    *fairness.SCENARIOS,
    *isolation.SCENARIOS,
    *overload.SCENARIOS,
    *mixed_priorities.SCENARIOS,
    *prefix_affinity.SCENARIOS,
    *simulator_speed.SCENARIOS,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named scenarios and print a table of each; write JSON and a PNG if asked.

    `arguments` replace those of the command line.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    chosen = [each for each in SCENARIOS if _begins_with_any(each.name, options.what)]
    if unknown := [
        what for what in options.what if not any(_begins_with_any(s.name, [what]) for s in chosen)
    ]:
        names = ", ".join(scenario.name for scenario in SCENARIOS)
        parser.error(f"no scenario begins with {unknown[0]!r}; there are {names}")
    if options.plot:
        plot.require_matplotlib()
    setting = Setting(_worker(parser, options), options.traces)
    report = SimulationReport(sys.argv[1:] if arguments is None else list(arguments), setting)
    console = Console(width=max(WIDTH, Console().width))
    for scenario in chosen:
        seeds = [scenario.measure(setting, seed) for seed in range(options.seeds)]
        console.print(table(report.add(scenario, seeds)))
    if options.json:
        report.write(options.json)
    if options.plot:
        plots.draw(options.plot, report.measured)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__)
    parser.add_argument(
        "what",
        nargs="*",
        metavar="SCENARIO",
        help="name of a scenario, or the start of it; all without",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every seed's values")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    traces = Path(os.environ.get(TRACES, "traces"))
    parser.add_argument("--traces", type=Path, default=traces, help=f"directory (or ${TRACES})")
    worker = parser.add_argument_group("the worker, where a scenario does not bring its own")
    worker.add_argument(
        "--worker", type=Path, metavar="FILE.json", help="the options below as JSON"
    )
    for each in fields(StepModel):
        assert each.default is not MISSING
        name = f"--{each.name.replace('_', '-')}"
        worker.add_argument(name, type=type(each.default), help=f"default {each.default:g}")
    return parser


def _begins_with_any(name: str, starts: Sequence[str]) -> bool:
    """True if a name begins with one of `starts`, or there are none."""
    return not starts or any(name.startswith(start) for start in starts)


def _worker(parser: argparse.ArgumentParser, options: argparse.Namespace) -> StepModel:
    """The worker's step model: the file's values, with the options given over them."""
    given = {f.name: value for f in fields(StepModel) if (value := getattr(options, f.name))}
    read = TypeAdapter(StepModel)
    try:
        base = read.validate_json(options.worker.read_bytes()) if options.worker else StepModel()
        return read.validate_python(vars(base) | given)
    except (OSError, ValidationError) as error:
        parser.error(f"--worker: {error}")


if __name__ == "__main__":
    main()

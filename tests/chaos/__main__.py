"""`python -m tests.chaos [--fault NAME …] [--seed N …] [--seeds N]`: the matrix, or a part of it.

Each run has a fresh cluster. Its history goes to `--histories`, what the checker and the clock say
of it to the terminal, and all figures with seeds, command and machine to `bench/results/`.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos import history, network_partition, report, wall_clock
from tests.chaos.checker import check
from tests.chaos.faults import FAULTS, ON_DEMAND
from tests.chaos.indexed_history import IndexedHistory
from tests.chaos.measurements import measure
from tests.chaos.plan import ClusterShape, Fault
from tests.chaos.report import Outcome
from tests.chaos.run import run_fault

SEEDS = 3
HISTORY = "history.jsonl"


def main() -> int:
    """0 if no run broke a rule."""
    words = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no cluster is left behind
    names = words.fault or [name for name in FAULTS if name not in ON_DEMAND]
    seeds = words.seed or list(range(1, words.seeds + 1))
    outcomes = []
    for name in names:
        if reason := _missing(FAULTS[name].shape):
            print(f"{name}: skipped, {reason}")
            continue
        for seed in seeds:
            kept = words.histories / f"{name}-{seed}"
            if not words.check:
                _record(FAULTS[name], seed, kept)
            elif not (kept / HISTORY).exists():
                continue
            outcomes.append(_checked(name, seed, kept))
            report.show(outcomes[-1])
            if words.results:
                report.write(outcomes[-1])
    report.table(outcomes)
    return int(any(outcome.violations for outcome in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--fault", action="append", choices=FAULTS, metavar="NAME", help=", ".join(FAULTS)
    )
    parser.add_argument("--seed", action="append", type=int, help="replay this seed; repeatable")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds, from 1 on")
    parser.add_argument("--histories", type=Path, default=Path("build/chaos"))
    parser.add_argument("--check", action="store_true", help="only check the histories there are")
    parser.add_argument("--results", action="store_true", help="add to bench/results/chaos-DATE")
    return parser


def _missing(shape: ClusterShape) -> str:
    """Why such a cluster cannot be made here; empty if it can."""
    needs = (
        (shape.own_clocks, wall_clock.missing_requirement),
        (shape.can_partition, network_partition.missing_requirement),
    )
    return next((m for needed, missing in needs if needed and (m := missing())), "")


def _record(fault: Fault, seed: int, kept: Path) -> None:
    """One run; its history and its processes' logs go to a folder of its own."""
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as home:
        try:
            events = asyncio.run(run_fault(fault, seed, Path(home)))
        finally:
            for log in Path(home).glob("**/*.log"):
                name = "-".join(log.relative_to(home).parts)
                (kept / name).write_bytes(log.read_bytes())
    (kept / HISTORY).write_text(history.dump(events))


def _checked(name: str, seed: int, kept: Path) -> Outcome:
    with (kept / HISTORY).open() as lines:
        events = list(history.load(lines))
    return Outcome(name, seed, measure(IndexedHistory(events)), check(events))


if __name__ == "__main__":
    sys.exit(main())

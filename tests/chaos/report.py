"""What runs have shown: a line for each, a table over all, a file for later."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine_info
from bench.daily_results import add_run
from bench.reporting import DIRECTORY
from tests.chaos.checker import RULES, RuleViolation
from tests.chaos.faults import FAULTS
from tests.chaos.measurements import Measurements

COLUMNS = (
    "fault",
    "seeds",
    "streams",
    "right",
    "violations",
    "hit",
    "moved",
    "refusals",
    "gap p50 s",
    "gap p99 s",
    "gap max s",
    "accept max s",
    "first token max s",
)
SHOWN = 10  # violations of one run


@dataclass(frozen=True)
class Outcome:
    fault: str
    seed: int
    figures: Measurements
    violations: list[RuleViolation]


def show(outcome: Outcome) -> None:
    """One run, with what it broke."""
    f = outcome.figures
    verdict = f"{len(outcome.violations)} VIOLATIONS" if outcome.violations else "exact"
    print(
        f"{outcome.fault} seed {outcome.seed}: {verdict} by {len(RULES)} rules; "
        f"{f.right}/{f.streams} streams right, {f.struck} hit, {f.moved} moved, "
        f"{f.refusals} refusals; "
        f"gap p50 {f.gap_p50:.2f} p99 {f.gap_p99:.2f} max {f.gap_max:.2f} s; "
        f"accept max {f.accept_max:.2f} s; first token max {f.first_max:.2f} s",
        flush=True,
    )
    for felt in f.felt if len(f.felt) > 1 else []:
        print(
            f"  {felt.deed} {felt.whom}: silence p50 {felt.silence_p50:.2f} "
            f"p99 {felt.silence_p99:.2f} max {felt.silence_max:.2f} s; "
            f"kept out {felt.kept_out:.2f} s"
        )
    if f.growth:
        print(f"  MiB more an hour: {f.growth}")
    for violation in outcome.violations[:SHOWN]:
        print(f"  {violation}")
    if len(outcome.violations) > SHOWN:
        print(f"  and {len(outcome.violations) - SHOWN} more")


def table(outcomes: Sequence[Outcome]) -> None:
    """A row for each fault, over its seeds."""
    grid = Table(title="chaos", title_justify="left")
    for column in COLUMNS:
        grid.add_column(column, justify="left" if column == "fault" else "right")
    for fault, group in groupby(outcomes, key=lambda outcome: outcome.fault):
        grid.add_row(fault, *_cells(list(group)))
    Console(width=160).print(grid)


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    found = [outcome.figures for outcome in outcomes]
    sums = [sum(f.streams for f in found), sum(f.right for f in found)]
    sums += [sum(len(outcome.violations) for outcome in outcomes), sum(f.struck for f in found)]
    sums += [sum(f.moved for f in found), sum(f.refusals for f in found)]
    worst = [max(f.gap_p50 for f in found), max(f.gap_p99 for f in found)]
    worst += [max(f.gap_max for f in found), max(f.accept_max for f in found)]
    worst += [max(f.first_max for f in found)]
    return [str(len(outcomes)), *map(str, sums), *(f"{value:.2f}" for value in worst)]


def write(outcome: Outcome, directory: Path = DIRECTORY) -> None:
    """Add a run to the file of the day: its figures, what it broke, how to repeat it, the machine.

    The same fault and seed is there once, as it went last.
    """
    rules = {"rules": [rule.__name__ for rule in RULES]}
    add_run("chaos", _run(outcome), _place, rules, directory)


def _place(run: dict[str, Any]) -> tuple[int, int]:
    """In the order of the table of faults, then of the seeds."""
    return list(FAULTS).index(run["fault"]), run["seed"]


def _run(outcome: Outcome) -> dict[str, Any]:
    return {
        "fault": outcome.fault,
        "seed": outcome.seed,
        "command": f"python -m tests.chaos --fault {outcome.fault} --seed {outcome.seed}",
        "commit": machine_info.commit(),
        "figures": asdict(outcome.figures),
        "violations": [str(violation) for violation in outcome.violations],
    }

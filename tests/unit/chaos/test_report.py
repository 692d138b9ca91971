"""What chaos runs leave behind: a long series comes of many commands."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos.checker import RuleViolation
from tests.chaos.indexed_history import IndexedHistory
from tests.chaos.measurements import measure
from tests.chaos.report import Outcome, write
from tests.unit.chaos.sample_history import GOOD_HISTORY

EXACT = Outcome("worker-kill", 7, measure(IndexedHistory(GOOD_HISTORY)), [])


def written(directory: Path) -> list[dict[str, Any]]:
    (file,) = directory.iterdir()
    return list(json.loads(file.read_text())["runs"])


def test_runs_of_a_day_are_collected(tmp_path: Path) -> None:
    """In the order of the table and the seeds, whatever was run first."""
    for outcome in (EXACT, replace(EXACT, seed=3), replace(EXACT, fault="worker-kill-queue")):
        write(outcome, tmp_path)
    names = [(run["fault"], run["seed"]) for run in written(tmp_path)]
    assert names == [("worker-kill-queue", 7), ("worker-kill", 3), ("worker-kill", 7)]


def test_a_run_that_is_repeated_counts_once(tmp_path: Path) -> None:
    """As it went last: a fault that was mended must not stay in the table."""
    write(replace(EXACT, violations=[RuleViolation("gap_free", "a", "a gap")]), tmp_path)
    write(EXACT, tmp_path)
    (run,) = written(tmp_path)
    assert run["violations"] == []

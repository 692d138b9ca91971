"""The file of the day in bench/results: what each class has reached, and on which machine."""

import json
import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

from bench import machine_info
from bench.reporting import DIRECTORY
from tests.adversary.promises import Adversary
from tests.adversary.report import Verdict


def add(verdict: Verdict, directory: Path = DIRECTORY) -> None:
    """Add a class's run; the same class on as many servers is there once, as it went last.

    Several processes may write.
    """
    path = directory / f"adversary-{datetime.now(UTC):%Y-%m-%d}.json"
    with path.open("a+") as file:
        flock(file, LOCK_EX)
        file.seek(0)
        before = json.loads(file.read() or '{"runs": []}')["runs"]
        runs = {_place(run): run for run in [*before, _run(verdict)]}
        file.truncate(0)
        file.write(json.dumps(_content([runs[place] for place in sorted(runs)]), indent=1) + "\n")


def _content(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": "adversary",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_info.describe_machine(),
        "runs": runs,
    }


def _place(run: dict[str, Any]) -> tuple[int, int]:
    """By the number of servers, then in the order of the classes."""
    return run["nodes"], list(Adversary).index(Adversary(run["adversary"]))


def _run(verdict: Verdict) -> dict[str, Any]:
    words = ("--nodes", str(verdict.nodes), "--class", verdict.adversary)
    command = shlex.join(("python", "-m", "tests.adversary", *words))
    return {**asdict(verdict), "command": command, "commit": machine_info.commit()}

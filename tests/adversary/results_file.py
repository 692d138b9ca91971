"""The file of the day in bench/results: what each class has reached, and on which machine."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import machine_info
from bench.daily_results import add_run
from bench.reporting import DIRECTORY
from tests.adversary.promises import Adversary
from tests.adversary.report import Verdict


def add(verdict: Verdict, directory: Path = DIRECTORY) -> None:
    """Add a class's run; the same class on as many servers is there once, as it went last."""
    add_run("adversary", _run(verdict), _place, directory=directory)


def _place(run: dict[str, Any]) -> tuple[int, int]:
    """By the number of servers, then in the order of the classes."""
    return run["nodes"], list(Adversary).index(Adversary(run["adversary"]))


def _run(verdict: Verdict) -> dict[str, Any]:
    words = ("--nodes", str(verdict.nodes), "--class", verdict.adversary)
    command = shlex.join(("python", "-m", "tests.adversary", *words))
    return {**asdict(verdict), "command": command, "commit": machine_info.commit()}

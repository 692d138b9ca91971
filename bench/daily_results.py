"""A file of results for each day, to which runs are added one by one, by several processes."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

from bench import machine_info
from bench.reporting import DIRECTORY

Record = dict[str, Any]


def add_run(
    name: str,
    run: Record,
    place_of: Callable[[Record], tuple[int, int]],
    facts: Mapping[str, Any] | None = None,
    directory: Path = DIRECTORY,
) -> None:
    """Add a run to `<name>-<today>.json` in `directory`, with a description of the machine.

    `place_of` gives a run's place in the file, in which it replaces an earlier one. `facts` are
    told beside the runs.
    """
    with (directory / f"{name}-{datetime.now(UTC):%Y-%m-%d}.json").open("a+") as file:
        flock(file, LOCK_EX)
        file.seek(0)
        before = json.loads(file.read() or '{"runs": []}')["runs"]
        runs = {place_of(each): each for each in [*before, run]}
        content = {
            "name": name,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine_info.describe_machine(),
            **(facts or {}),
            "runs": [runs[place] for place in sorted(runs)],
        }
        file.truncate(0)
        file.write(json.dumps(content, indent=1) + "\n")

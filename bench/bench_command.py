"""Runs `millstream bench` against a running `millstream up`, as a process of its own."""

import json
import subprocess
import sys
from typing import Any

from tests.support.millstream_up import KEY, MillstreamUp, environment_without_settings

SERVICES = {
    "gateway": "gateway",
    "dispatcher": "dispatcher",
    "worker": "worker",
    "nats": "nats-server",
}


def measure_up(up: MillstreamUp, *words: str) -> dict[str, Any]:
    """Run one load on a `millstream up` and return its report, with the CPU of every service.

    `words` are further options. Raises as `run_bench` does.
    """
    return run_bench(up.url, {name: up.pids(word)[0] for name, word in SERVICES.items()}, *words)


def run_bench(url: str, pids: dict[str, int], *words: str) -> dict[str, Any]:
    """Run one load on the server at `url` and return its report, with the CPU of `pids` by name.

    `words` are further options. Raises `CalledProcessError` if the command failed and
    `AssertionError` if a request did.
    """
    named = ",".join(f"{name}={pid}" for name, pid in pids.items())
    command = [sys.executable, "-m", "millstream", "bench", "--json", "--url", url]
    command += ["--api-key", KEY, "--pids", named, *words]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment_without_settings()
    )
    found: dict[str, Any] = json.loads(done.stdout)["report"]
    assert not found["errors"], found["errors"]
    return found

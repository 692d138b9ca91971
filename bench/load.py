"""`millstream bench` against a running `millstream up`, as a process of its own."""

import json
import subprocess
import sys
from typing import Any

from tests.e2e.running import KEY, Running

SERVICES = {
    "gateway": "gateway",
    "dispatcher": "dispatcher",
    "worker": "worker",
    "nats": "nats-server",
}


def put(up: Running, *words: str) -> dict[str, Any]:
    """The report of one load; raises if the command failed or a request did."""
    pids = [f"{name}={up.pids(word)[0]}" for name, word in SERVICES.items()]
    command = [sys.executable, "-m", "millstream", "bench", "--json", "--url", up.url]
    command += ["--api-key", KEY, "--pids", ",".join(pids), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)["report"]
    assert not report["errors"], report["errors"]
    return report

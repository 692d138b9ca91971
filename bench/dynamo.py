"""Runs NVIDIA Dynamo's front end with workers whose tokens cost nothing.

MILLSTREAM_BENCH_DYNAMO names the Python of an environment that has `ai-dynamo` (1.6).
"""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_worker.engines import demo_models
from millstream.up.demo_conversion_process import cache_directory
from tests.support.millstream_up import wait_until
from tests.support.ports import free_port

PYTHON = "MILLSTREAM_BENCH_DYNAMO"
READY_SECONDS = 60.0
SCRIPT = Path(__file__).parent / "contenders/dynamo_worker.py"


@dataclass(frozen=True)
class Dynamo:
    """A running Dynamo: its URL and the process ids of front end and workers."""

    url: str
    front_end: int
    workers: list[int]


def require_dynamo() -> None:
    """Raise `SystemExit` if no environment with Dynamo is named."""
    if PYTHON not in os.environ:
        raise SystemExit(f"{PYTHON} has to name a Python that has ai-dynamo")


@contextmanager
def run_dynamo(
    home: Path,
    ttft_ms: float,
    itl_ms: float,
    *words: str,
    workers: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Dynamo]:
    """Run Dynamo with the model `mock` during the context, which begins when it is ready.

    `words` and `environment` are options of the front end.
    """
    port = free_port()
    front_end = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    front_end += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    directory = demo_models.find_model("gemma-3-270m", cache_directory(), lambda stage, done: None)
    worker = [str(SCRIPT), str(directory), str(ttft_ms / 1000), str(itl_ms / 1000)]
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        first = stack.enter_context(_process(home, environment or {}, *front_end, *words))
        running = [stack.enter_context(_process(home, {}, *worker)) for _ in range(workers)]
        wait_until(lambda: _serves(url, workers), READY_SECONDS)
        yield Dynamo(url, first.pid, [process.pid for process in running])


@contextmanager
def _process(
    home: Path, environment: Mapping[str, str], *words: str
) -> Iterator["subprocess.Popen[bytes]"]:
    own = {"DYN_FILE_KV": str(home), "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1", **environment}
    command, quiet = [os.environ[PYTHON], *words], subprocess.DEVNULL
    running = subprocess.Popen(command, env={**os.environ, **own}, stdout=quiet, stderr=quiet)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def _serves(url: str, workers: int) -> bool:
    try:
        models, health = _get(f"{url}/v1/models"), _get(f"{url}/health")
        return bool(models["data"]) and len(health["instances"]) == workers
    except OSError:
        return False


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=1) as answer:
        return json.load(answer)

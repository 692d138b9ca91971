"""The gateway beside the front end of NVIDIA Dynamo, which is written in Rust, at the same load.

MILLSTREAM_BENCH_DYNAMO names the Python of an environment that has `ai-dynamo` (1.6). Both have
a worker whose tokens come at the same times and cost next to nothing. Theirs passes requests on
from process to process, a token at a time; ours stores requests and tokens before anybody sees
them, and puts what comes at the same time into one chunk.
"""

import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import load, results
from bench.pipeline import ITL_MS, STREAMS, TOKENS, TTFT_MS, WORDS
from bench.results import Figure, Run
from gpu_worker.engines import demo
from millstream.up.preparation import cache_directory
from tests.e2e.running import Running, free_port, wait_until

PYTHON = "MILLSTREAM_BENCH_DYNAMO"
READY_SECONDS = 60.0
WAYS = {
    "websocket": "gateway, WebSocket",
    "sse": "gateway, SSE",
    "dynamo": "Dynamo, SSE",
}
MEASURES = {
    "us_per_token": "CPU, µs per token",
    "tokens_per_second": "tokens/s",
    "tokens_per_chunk": "tokens per chunk",
}
FIGURES = (
    *(Figure(f"{w}_{m}", f"{WAYS[w]}: {MEASURES[m]}") for m in MEASURES for w in WAYS),
    Figure("websocket_ratio", "CPU per token, gateway with WebSocket over Dynamo", "≤ 1"),
    Figure("sse_ratio", "CPU per token, gateway with SSE over Dynamo", "≤ 1"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure both by turns, each in fresh processes, and publish."""
    if PYTHON not in os.environ:
        raise SystemExit(f"{PYTHON} has to name a Python that has ai-dynamo")
    setting = {
        "mock_ttft_ms": TTFT_MS,
        "mock_itl_ms": ITL_MS,
        "relay": f"{STREAMS} streams of {TOKENS} tokens, {seconds} s",
    }
    results.publish("front_ends", setting, FIGURES, [_run(seconds) for _ in range(runs)])


def _run(seconds: float) -> Run:
    with tempfile.TemporaryDirectory() as home:
        with Running(Path(home), *WORDS) as up:
            up.ready()
            pids = {"front_end": up.pids("gateway")[0]}
            ours = {
                **_measured("websocket", up.url, pids, seconds, "--protocol", "ws"),
                **_measured("sse", up.url, pids, seconds, "--protocol", "sse"),
            }
    with tempfile.TemporaryDirectory() as home, _dynamo(Path(home)) as (url, pids):
        theirs = _measured("dynamo", url, pids, seconds, "--protocol", "sse")
    dynamo = theirs["dynamo_us_per_token"]
    ratios = {f"{way}_ratio": ours[f"{way}_us_per_token"] / dynamo for way in ("websocket", "sse")}
    return {**ours, **theirs, **ratios}


def _measured(way: str, url: str, pids: dict[str, int], seconds: float, *words: str) -> Run:
    many = ("--concurrency", str(STREAMS), "--output-tokens", str(TOKENS))
    report = load.report(url, pids, "--model", "mock", *words, *many, "--duration", str(seconds))
    return {
        f"{way}_us_per_token": report["cpu_us_per_token"]["front_end"],
        f"{way}_tokens_per_second": report["tokens_per_second"],
        f"{way}_tokens_per_chunk": report["tokens_per_chunk"],
    }


@contextmanager
def _dynamo(home: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Its front end and a worker; their address, and whose CPU counts."""
    port = free_port()
    front_end = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    front_end += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    directory = demo.find("gemma-3-270m", cache_directory(), lambda stage, done: None)
    script = str(Path(__file__).parent / "contenders/dynamo_worker.py")
    worker = [script, str(directory), str(TTFT_MS / 1000), str(ITL_MS / 1000)]
    url = f"http://127.0.0.1:{port}"
    with _process(home, *front_end) as first, _process(home, *worker):
        wait_until(lambda: _serves(url), READY_SECONDS)
        yield url, {"front_end": first.pid}


@contextmanager
def _process(home: Path, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    own = {"DYN_FILE_KV": str(home), "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1"}
    command, quiet = [os.environ[PYTHON], *words], subprocess.DEVNULL
    running = subprocess.Popen(command, env={**os.environ, **own}, stdout=quiet, stderr=quiet)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def _serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=1) as answer:
            return b'"mock"' in bytes(answer.read())
    except OSError:
        return False

"""Compares the gateway with the front end of NVIDIA Dynamo, written in Rust, at the same load.

Both have a worker whose tokens come at the same times and cost next to nothing. Dynamo passes
requests from process to process, one token at a time; we store requests and tokens before anybody
sees them, and put tokens that come at the same time into one chunk.
"""

import tempfile
from pathlib import Path

from bench import bench_command, dynamo, reporting
from bench.pipeline_cost import ITL_MS, STREAMS, TOKENS, TTFT_MS, WORDS
from bench.reporting import Figure, Run
from tests.support.millstream_up import MillstreamUp

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
    """Measure both in turn, each in fresh processes, and publish."""
    dynamo.require_dynamo()
    setting = {
        "mock_ttft_ms": TTFT_MS,
        "mock_itl_ms": ITL_MS,
        "relay": f"{STREAMS} streams of {TOKENS} tokens, {seconds} s",
    }
    reporting.publish("front_ends", setting, FIGURES, [_run(seconds) for _ in range(runs)])


def _run(seconds: float) -> Run:
    with tempfile.TemporaryDirectory() as home:
        with MillstreamUp(Path(home), *WORDS) as up:
            up.wait_until_ready()
            pids = {"front_end": up.pids("gateway")[0]}
            ours = {
                **_measured("websocket", up.url, pids, seconds, "--protocol", "ws"),
                **_measured("sse", up.url, pids, seconds, "--protocol", "sse"),
            }
    with (
        tempfile.TemporaryDirectory() as home,
        dynamo.run_dynamo(Path(home), TTFT_MS, ITL_MS) as running,
    ):
        pids = {"front_end": running.front_end}
        theirs = _measured("dynamo", running.url, pids, seconds, "--protocol", "sse")
    base = theirs["dynamo_us_per_token"]
    ratios = {f"{way}_ratio": ours[f"{way}_us_per_token"] / base for way in ("websocket", "sse")}
    return {**ours, **theirs, **ratios}


def _measured(way: str, url: str, pids: dict[str, int], seconds: float, *words: str) -> Run:
    load = ("--concurrency", str(STREAMS), "--output-tokens", str(TOKENS))
    report = bench_command.run_bench(
        url, pids, "--model", "mock", *words, *load, "--duration", str(seconds)
    )
    return {
        f"{way}_us_per_token": report["cpu_us_per_token"]["front_end"],
        f"{way}_tokens_per_second": report["tokens_per_second"],
        f"{way}_tokens_per_chunk": report["tokens_per_chunk"],
    }

"""Measures a curve and compares what `millstream plan` forecasts by it with a live run.

One worker of a machine type whose mock model takes its pace from a step model; a bench of its
curve; then an open loop (Poisson) at a good part of what it can do, with lengths that were not
among those of the curve. The plan is asked for the rate that came.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import reporting
from bench.reporting import Figure, Run
from tests.support.millstream_up import KEY, MillstreamUp, environment_without_settings, wait_until

MODEL, TYPE, VERSION = "mock", "measured", "1"
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 100
SHARE = 0.65  # of what the worker can do
MIN_SECONDS = 60.0
TABLE = f"""
[fleet.types.{TYPE}]
price_per_hour = 0.6
[fleet.types.{TYPE}.step_model]
step_ms = 15
sequence_ms = 0.4
context_us = 1
prefill_ms = 4
token_ms = 0.15
kv_tokens = 20000
max_sequences = 32
"""

FIGURES = (
    Figure("curve_seconds", "time to measure the curve, s"),
    Figure("rate", "requests/s that came"),
    Figure("request_forecast_ms", "a request, forecast, mean, ms"),
    Figure("request_ms", "a request, live, mean, ms"),
    Figure("request_ratio", "forecast over live", "0.9 to 1.1"),
    Figure("token_forecast_ms", "from token to token, forecast, mean, ms"),
    Figure("token_ms", "from token to token, live, mean, ms"),
    Figure("token_ratio", "forecast over live", "0.9 to 1.1"),
    Figure("first_forecast_ms", "first token, forecast, mean, ms"),
    Figure("first_ms", "first token, live, mean, ms"),
    Figure("first_ratio", "forecast over live"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure and compare, and publish the ratios."""
    setting = {"table": TABLE, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    found = [_measure_once(max(seconds, MIN_SECONDS)) for _ in range(runs)]
    reporting.publish("capacity", {**setting, "share": SHARE}, FIGURES, found)


def _measure_once(seconds: float) -> Run:
    with _fleet_up() as up:
        began = time.monotonic()
        _ask(up, "bench", "--curve", "--model", MODEL)
        curve_seconds = time.monotonic() - began
        most = _plan(up, 1.0)["requests_per_second_of_a_worker"]
        words = ("--rate", f"{SHARE * most:.3f}", "--duration", f"{seconds:g}")
        lengths = ("--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS))
        live = _ask(up, "bench", "--model", MODEL, *words, *lengths)["report"]
        assert not live["errors"], live["errors"]
        rate = live["requests"] / seconds
        plan = _plan(up, rate)
    assert plan["workers"] == 1, plan
    first = live["latencies_ms"]["ttft"]["mean"]
    request = live["latencies_ms"]["end_to_end"]["mean"]
    token = (request - first) / (OUTPUT_TOKENS - 1)
    forecast_first = 1000 * plan["first_token_seconds"]
    forecast_token = 1000 * plan["token_seconds"]
    forecast_request = forecast_first + (OUTPUT_TOKENS - 1) * forecast_token
    return {
        "curve_seconds": curve_seconds,
        "rate": rate,
        "request_forecast_ms": forecast_request,
        "request_ms": request,
        "request_ratio": forecast_request / request,
        "token_forecast_ms": forecast_token,
        "token_ms": token,
        "token_ratio": forecast_token / token,
        "first_forecast_ms": forecast_first,
        "first_ms": first,
        "first_ratio": forecast_first / first,
    }


@contextmanager
def _fleet_up() -> Iterator[MillstreamUp]:
    """A `millstream up` with one worker of the type."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        config = home / "fleet.toml"
        config.write_text(TABLE)
        words = ("--config", str(config), "--model", MODEL, "--api-key", KEY)
        with MillstreamUp(home, *words) as up:
            up.wait_until_ready()
            _ask(up, "fleet", "set", TYPE, "1", "--model", MODEL)
            wait_until(lambda: _workers(up), seconds=60)
            yield up


def _workers(up: MillstreamUp) -> Any:
    return _ask(up, "lag")["workers"]


def _plan(up: MillstreamUp, rate: float) -> dict[str, Any]:
    lengths = ("--prompt", str(PROMPT_TOKENS), "--output", str(OUTPUT_TOKENS))
    words = ("--rate", f"{rate:.4f}", "--model", MODEL, "--utilisation", "0.95")
    return _ask(up, "plan", *words, *lengths)


def _ask(up: MillstreamUp, *words: str) -> dict[str, Any]:
    """Return what a command prints as JSON."""
    command = [sys.executable, "-m", "millstream", *words]
    command += ["--json", "--data-dir", str(up.home / "data")]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment_without_settings()
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found

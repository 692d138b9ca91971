"""Measures what gateways carry: requests and tokens a second through one, and through two.

The load generator, nats-server, the dispatcher and the worker share the machine with them: where it
has few cores, two gateways carry more only if the gateway was what limited one. So what a gateway
takes of a core for each request and token is measured, too; its inverse is what one with a core of
its own carries.
"""

import tempfile
from pathlib import Path

from bench import bench_command, reporting
from bench.bench_command import SERVICES
from bench.reporting import Figure, Run
from tests.support.millstream_up import KEY, MillstreamUp

COUNTS = 1, 2
STREAMS, TOKENS = 256, 128
SHORT_REQUESTS = 64  # at once, of one token
WORDS = (
    *("--model", "mock", "--mock-ttft-ms", "1", "--mock-itl-ms", "2", "--mock-sequences", "512"),
    *("--api-key", KEY),
)

FIGURES = tuple(
    figure
    for count in COUNTS
    for figure in (
        Figure(f"requests_per_second_{count}", f"requests/s of one token, {count} gateway(s)"),
        Figure(f"us_per_request_{count}", f"gateway CPU, µs per request, {count} gateway(s)"),
        Figure(f"tokens_per_second_{count}", f"tokens/s, {count} gateway(s)"),
        Figure(f"us_per_token_{count}", f"gateway CPU, µs per token, {count} gateway(s)"),
        Figure(f"largest_share_{count}", f"CPU share of the busiest gateway of {count}"),
    )
)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, each on a fresh `millstream up` for each number of gateways."""
    setting = {
        "short": f"{SHORT_REQUESTS} requests of 64 + 1 tokens at once over HTTP, {seconds} s",
        "long": f"{STREAMS} streams of {TOKENS} tokens over 16 WebSockets, {seconds} s",
    }
    results = [_run(seconds) for _ in range(runs)]
    reporting.publish("gateways", setting, FIGURES, results)


def _run(seconds: float) -> Run:
    found: dict[str, float] = {}
    for count in COUNTS:
        with tempfile.TemporaryDirectory() as home:
            words = [*WORDS, "--gateways", str(count)]
            with MillstreamUp(Path(home), *words) as up:
                up.wait_until_ready()
                each = {**_short(up, seconds), **_long(up, seconds)}
                found |= {f"{name}_{count}": value for name, value in each.items()}
    return found


def _short(up: MillstreamUp, seconds: float) -> Run:
    words = ["--protocol", "sse", "--concurrency", str(SHORT_REQUESTS), "--output-tokens", "1"]
    report = bench_command.run_bench(up.url, _pids(up), *words, "--duration", str(seconds))
    cpu = _gateway_cpu(report["cpu_us_per_token"])
    # Of one token each, so that what a token takes is what a request takes
    return {
        "requests_per_second": report["tokens_per_second"],
        "us_per_request": sum(cpu),
    }


def _long(up: MillstreamUp, seconds: float) -> Run:
    words = ["--concurrency", str(STREAMS), "--sockets", "16", "--output-tokens", str(TOKENS)]
    report = bench_command.run_bench(up.url, _pids(up), *words, "--duration", str(seconds))
    cpu = _gateway_cpu(report["cpu_us_per_token"])
    return {
        "tokens_per_second": report["tokens_per_second"],
        "us_per_token": sum(cpu),
        "largest_share": max(cpu) / sum(cpu),
    }


def _pids(up: MillstreamUp) -> dict[str, int]:
    others = {name: up.pids(word)[0] for name, word in SERVICES.items() if name != "gateway"}
    return others | {f"gateway-{n}": pid for n, pid in enumerate(up.pids("gateway"), 1)}


def _gateway_cpu(by_process: dict[str, float]) -> list[float]:
    return [us for name, us in by_process.items() if name.startswith("gateway")]

"""Measures what the pipeline costs, around a mock engine that costs next to nothing.

With TLS as well, `python -m bench pipeline-tls`: the gateway's rise is that of encryption.

(a) CPU per relayed token with 128 streams of 64 tokens, 6 ms apart. (b) Time to first token beyond
the mock's own, one request at a time.
"""

import tempfile
from pathlib import Path

from bench import bench_command, reporting
from bench.reporting import Figure, Run
from tests.support.certificates import CertificateAuthority
from tests.support.millstream_up import KEY, MillstreamUp

TTFT_MS, ITL_MS = 20, 6
STREAMS, TOKENS = 128, 64
REQUESTS = 500
WORDS = (
    *("--model", "mock", "--mock-ttft-ms", str(TTFT_MS), "--mock-itl-ms", str(ITL_MS)),
    *("--api-key", KEY),
)

FIGURES = (
    Figure("gateway_us_per_token", "gateway CPU, µs per token", "≤ 25"),
    Figure("dispatcher_us_per_token", "dispatcher CPU, µs per token"),
    Figure("worker_us_per_token", "worker CPU, µs per token"),
    Figure("nats_us_per_token", "nats-server CPU, µs per token"),
    Figure("bench_us_per_token", "load generator CPU, µs per token"),
    Figure("tokens_per_second", f"tokens/s of {STREAMS} streams"),
    Figure("tokens_per_chunk", "tokens per chunk"),
    Figure("loaded_inter_token_p99_ms", f"inter-token p99 of {STREAMS} streams, ms"),
    Figure("added_ttft_p50_ms", "added time to first token, p50, ms", "≤ 5"),
    Figure("added_ttft_p99_ms", "added time to first token, p99, ms", "≤ 15"),
)


def measure(runs: int, seconds: float, *, tls: bool = False) -> None:
    """Measure `runs` times, each on a fresh `millstream up`, and publish."""
    setting = {
        "mock_ttft_ms": TTFT_MS,
        "mock_itl_ms": ITL_MS,
        "relay": f"{STREAMS} streams of {TOKENS} tokens over 4 WebSockets, {seconds} s",
        "first_token": f"1 stream, {REQUESTS} requests",
    }
    name = "pipeline-tls" if tls else "pipeline"
    reporting.publish(name, setting, FIGURES, [_run(seconds, tls) for _ in range(runs)])


def _run(seconds: float, tls: bool) -> Run:
    with tempfile.TemporaryDirectory() as home:
        words, client = list(WORDS), list[str]()
        if tls:
            authority = CertificateAuthority(Path(home))
            words += authority.server_words()
            client = ["--ca", str(authority.file)]
        with MillstreamUp(Path(home), *words) as up:
            up.wait_until_ready()
            return {**_first_token(up, client), **_relay(up, client, seconds)}


def _relay(up: MillstreamUp, client: list[str], seconds: float) -> Run:
    words = [*client, "--concurrency", str(STREAMS), "--output-tokens", str(TOKENS)]
    report = bench_command.measure_up(up, *words, "--duration", str(seconds))
    cpu = {f"{name}_us_per_token": us for name, us in report["cpu_us_per_token"].items()}
    return {
        **cpu,
        "tokens_per_second": report["tokens_per_second"],
        "tokens_per_chunk": report["tokens_per_chunk"],
        "loaded_inter_token_p99_ms": report["latencies_ms"]["inter_token"]["p99"],
    }


def _first_token(up: MillstreamUp, client: list[str]) -> Run:
    words = [*client, "--concurrency", "1", "--requests", str(REQUESTS), "--output-tokens", "2"]
    report = bench_command.measure_up(up, *words, "--warmup", "20")
    ttft = report["latencies_ms"]["ttft"]
    return {f"added_ttft_{q}_ms": ttft[q] - TTFT_MS for q in ("p50", "p99")}

"""Embeddings of MiniLM: through the pipeline one per request and many per request, and directly.

Direct is the engine in a process of its own, always with `AT_ONCE` requests of one input: the most
that any pipeline around it can reach.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from statistics import quantiles

from websockets.asyncio.client import connect

from bench import reporting
from bench.reporting import Figure, Run
from gpu_worker.engines import demo_models, factory
from gpu_worker.engines.engine import Sequence
from tests.support.millstream_up import KEY, MillstreamUp

MODEL = "all-minilm-l6-v2"
AT_ONCE, MANY, TOKENS = 32, 32, 32

FIGURES = (
    Figure("direct_per_second", "embeddings/s of the engine alone"),
    Figure("single_per_second", f"embeddings/s, {AT_ONCE} requests of one input at once"),
    Figure("single_p50_ms", "their latency, p50, ms"),
    Figure("single_p99_ms", "their latency, p99, ms"),
    Figure("many_per_second", f"embeddings/s, 2 requests of {MANY} inputs at once"),
    Figure("alone_p50_ms", "latency of one request at a time, p50, ms"),
    Figure("alone_p99_ms", "the same, p99, ms"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure in fresh processes each time, and publish."""
    setting = {"model": MODEL, "tokens_per_input": TOKENS, "seconds": seconds}
    reporting.publish("embeddings", setting, FIGURES, [_run(seconds) for _ in range(runs)])


def _run(seconds: float) -> Run:
    with tempfile.TemporaryDirectory() as home:
        with MillstreamUp(Path(home), "--model", MODEL, "--api-key", KEY) as up:
            up.wait_until_ready()
            asyncio.run(_put(up, AT_ONCE, 1, 1.0))
            alone, _ = asyncio.run(_put(up, 1, 1, seconds))
            single, single_rate = asyncio.run(_put(up, AT_ONCE, 1, seconds))
            _, many_rate = asyncio.run(_put(up, 2, MANY, seconds))
    return {
        "direct_per_second": _direct(seconds),
        "single_per_second": single_rate,
        "single_p50_ms": single[49],
        "single_p99_ms": single[98],
        "many_per_second": many_rate * MANY,
        "alone_p50_ms": alone[49],
        "alone_p99_ms": alone[98],
    }


def _inputs(inputs: int) -> Iterator[list[list[int]]]:
    """Different token ids each time, `TOKENS` per input."""
    for number in count():
        yield [
            [1000 + (number * 31 + i * 7 + t) % 20000 for t in range(TOKENS)] for i in range(inputs)
        ]


async def _put(
    up: MillstreamUp, at_once: int, inputs: int, seconds: float
) -> tuple[list[float], float]:
    """Percentiles of latency in ms, and requests per second, with so many at once on a socket."""
    latencies: list[float] = []
    url, headers = up.url.replace("http", "ws") + "/v1/stream", {"Authorization": f"Bearer {KEY}"}
    async with connect(url, additional_headers=headers, max_size=None) as socket:
        asked = enumerate(_inputs(inputs))
        sent: dict[str, float] = {}

        async def ask() -> None:
            number, ids = next(asked)
            sent[str(number)] = time.perf_counter()
            frame = {"type": "embed", "id": str(number), "model": MODEL, "input": ids}
            await socket.send(json.dumps(frame))

        began = time.perf_counter()
        for _ in range(at_once):
            await ask()
        while (elapsed := time.perf_counter() - began) < seconds:
            frame = json.loads(await socket.recv())
            assert frame["type"] != "error", frame
            if frame["type"] == "result":
                latencies.append((time.perf_counter() - sent.pop(frame["id"])) * 1000)
                await ask()
    return quantiles(latencies, n=100), len(latencies) / elapsed


def _direct(seconds: float) -> float:
    command = [sys.executable, "-m", "bench.embeddings", str(seconds)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main(seconds: float) -> None:
    """Print the embeddings per second of the engine alone."""
    engine = factory.build("embed", demo_models.find_model(MODEL, Path()), {})
    asked = (Sequence(f"s{n}", inputs=ids) for n, ids in enumerate(_inputs(1)))
    for sequence in islice(asked, AT_ONCE):
        engine.add(sequence)
    began, done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        for output in engine.step():
            assert output.vectors, output.error
            done += 1
            engine.add(next(asked))
    print(done / elapsed)


if __name__ == "__main__":
    main(float(sys.argv[1]))

"""Compares streams of Millstream and NVIDIA Dynamo while one of two workers dies or freezes.

A stream is whole if its text is that of an undisturbed run. A gap is the longest time between two
events of one stream. Dynamo runs with its defaults, and with all its means against such faults:
migration, and a timeout after which a silent worker is given up.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai

from bench import dynamo, reporting
from bench.reporting import Figure, Run
from tests.support.millstream_up import KEY, MillstreamUp

STREAMS, TOKENS, TTFT_MS, ITL_MS = 10, 150, 20, 20
STRIKE_SECONDS = 1.0  # after the streams began
FROZEN_SECONDS, MOST_SECONDS = 30.0, 60.0
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
WAYS = {
    "millstream": "Millstream",
    "dynamo": "Dynamo",
    "dynamo_best": "Dynamo, with migration and a timeout of 2 s",
}
FIGURES = tuple(
    Figure(f"{fault}_{way}_{what}", f"{fault}, {WAYS[way]}: {words}")
    for fault in SIGNALS
    for way in WAYS
    for what, words in (("whole", f"whole, of {STREAMS}"), ("gap", "longest gap, s"))
)
WORDS = (
    *("--model", "mock", "--mock-ttft-ms", str(TTFT_MS), "--mock-itl-ms", str(ITL_MS)),
    *("--workers", "2", "--api-key", KEY),
)


@dataclass(frozen=True)
class _TestedSystem:
    url: str
    workers: list[int]


@dataclass(frozen=True)
class _StreamResult:
    """The text that a client got, whether the stream ended well, and its longest gap in seconds."""

    text: str
    ended: bool
    gap: float


def measure(runs: int, seconds: float) -> None:
    """Measure all in turn, each in fresh processes, and publish; `seconds` has no effect here."""
    dynamo.require_dynamo()
    setting = {"streams": STREAMS, "tokens": TOKENS, "ttft_ms": TTFT_MS, "itl_ms": ITL_MS}
    reporting.publish("failures", setting, FIGURES, [_run() for _ in range(runs)])


def _run() -> Run:
    found: dict[str, float] = {}
    for fault, number in SIGNALS.items():
        for way in WAYS:
            with tempfile.TemporaryDirectory() as home, _start_system(way, Path(home)) as system:
                whole, gap = asyncio.run(_measure_fault(system, number))
            found |= {f"{fault}_{way}_whole": whole, f"{fault}_{way}_gap": gap}
    return found


@contextmanager
def _start_system(way: str, home: Path) -> Iterator[_TestedSystem]:
    if way == "millstream":
        with MillstreamUp(home, *WORDS) as up:
            up.wait_until_ready()
            yield _TestedSystem(up.url, up.pids("millstream worker"))
        return
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    if way == "dynamo_best":
        words = ("--migration-limit", "3")
        environment = {"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "2"}
    with dynamo.run_dynamo(
        home, TTFT_MS, ITL_MS, *words, workers=2, environment=environment
    ) as running:
        yield _TestedSystem(running.url, running.workers)


async def _measure_fault(system: _TestedSystem, number: signal.Signals) -> tuple[int, float]:
    """Strike one worker with the signal; the number of whole streams, and their longest gap."""
    async with openai.AsyncOpenAI(
        base_url=f"{system.url}/v1", api_key=KEY, max_retries=0, timeout=MOST_SECONDS
    ) as client:
        undisturbed = await _run_streams(client)
        assert all(stream.ended for stream in undisturbed), undisturbed
        running = asyncio.create_task(_run_streams(client))
        await asyncio.sleep(STRIKE_SECONDS)
        os.kill(system.workers[0], number)
        if number is signal.SIGSTOP:
            asyncio.get_running_loop().call_later(
                FROZEN_SECONDS, os.kill, system.workers[0], signal.SIGCONT
            )
        streams = await running
    expected = [stream.text for stream in undisturbed]
    whole = [s for s, text in zip(streams, expected, strict=True) if s.ended and s.text == text]
    return len(whole), max((stream.gap for stream in whole), default=0.0)


async def _run_streams(client: openai.AsyncOpenAI) -> list[_StreamResult]:
    return await asyncio.gather(*(_run_stream(client, f"stream {n}") for n in range(STREAMS)))


async def _run_stream(client: openai.AsyncOpenAI, prompt: str) -> _StreamResult:
    text, ended, gap, last = "", False, 0.0, 0.0
    try:
        async with asyncio.timeout(MOST_SECONDS):
            async for event in await client.completions.create(
                model="mock", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True
            ):
                now = time.monotonic()
                gap, last = max(gap, now - (last or now)), now
                text += "".join(choice.text for choice in event.choices)
                ended = any(choice.finish_reason == "length" for choice in event.choices)
    except (openai.OpenAIError, TimeoutError):
        pass  # the stream counts as not whole
    return _StreamResult(text, ended, gap)

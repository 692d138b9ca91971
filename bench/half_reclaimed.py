"""Measures what clients notice when half of the machines are taken back at once.

`millstream up` runs two machines that stay and two spot machines, which are taken back together,
with notice, while streams run on all four. Each stream is compared with the same request to a cell
that is left alone. The longest gap between two chunks is told apart for streams that were handed
over and for the others, which shows what the machine itself stalls.
"""

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import reporting
from bench.reporting import Figure, Run
from tests.support.gateways import KEY, RunningGateway
from tests.support.millstream_up import MillstreamUp, run_millstream, wait_until

NOTICES = 30, 2
# A minute each: what ends within the notice is not handed over
STREAMS, TOKENS, ITL_MS = 40, 1_500, 40
RECLAIM_SECONDS = 100  # so old, the spot machines are taken back
EARLY_SECONDS = 12.0  # before that, the streams begin
PATIENCE_SECONDS = 120.0
TABLE = """
[fleet.types.steady]
price_per_hour = 1.0
[fleet.types.spot]
price_per_hour = 0.3
spot = true
notice_seconds = {notice}
reclaim_after_seconds = {age}
"""
FIGURES = tuple(
    figure
    for notice, goal in zip(NOTICES, ("≤ 300", "≤ 3500"), strict=True)
    for figure in (
        Figure(f"equal_{notice}", f"streams equal byte for byte, notice {notice} s", f"{STREAMS}"),
        Figure(f"handed_over_{notice}", f"streams handed over, notice {notice} s"),
        Figure(f"gap_ms_{notice}", f"longest gap of those, ms, notice {notice} s", goal),
        Figure(f"other_gap_ms_{notice}", f"longest gap of the others, ms, notice {notice} s"),
    )
)


@dataclass
class Stream:
    """One stream as its client has seen it."""

    text: str = ""
    attempts: int = 0
    longest_gap: float = 0.0
    heard_at: float | None = None

    def take(self, frame: dict[str, object], now: float) -> None:
        """Note a frame that came at `now`, in monotonic seconds."""
        if frame["type"] == "started":
            self.attempts += 1
        elif frame["type"] == "chunk":
            self.text += str(frame["text"])
            if self.heard_at is not None:
                self.longest_gap = max(self.longest_gap, now - self.heard_at)
            self.heard_at = now


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times with each notice, and publish; `seconds` is not used."""
    setting = {
        "machines": "2 steady, 2 spot, which are taken back together",
        "streams": f"{STREAMS} of {TOKENS} tokens, {ITL_MS} ms apart, over WebSockets",
    }
    reporting.publish("half-reclaimed", setting, FIGURES, [_run() for _ in range(runs)])


def _run() -> Run:
    expected = _undisturbed()
    found: dict[str, float] = {}
    for notice in NOTICES:
        streams = _reclaimed(notice)
        moved = [each for each in streams if each.attempts > 1]
        others = [each for each in streams if each.attempts == 1]
        found |= {
            f"equal_{notice}": sum(
                each.text == text for each, text in zip(streams, expected, strict=True)
            ),
            f"handed_over_{notice}": len(moved),
            f"gap_ms_{notice}": 1000 * max((each.longest_gap for each in moved), default=0.0),
            f"other_gap_ms_{notice}": 1000 * max(each.longest_gap for each in others),
        }
    return found


def _undisturbed() -> list[str]:
    with tempfile.TemporaryDirectory() as home:
        words = ["--model", "mock", "--api-key", KEY, "--mock-itl-ms", "1"]
        with MillstreamUp(Path(home), *words) as up:
            up.wait_until_ready()
            return [each.text for each in asyncio.run(_stream_all(up))]


def _reclaimed(notice: int) -> list[Stream]:
    with tempfile.TemporaryDirectory() as home:
        config = Path(home) / "fleet.toml"
        config.write_text(TABLE.format(notice=notice, age=RECLAIM_SECONDS))
        words = ["--config", str(config), "--model", "mock", "--api-key", KEY]
        words += ["--mock-itl-ms", str(ITL_MS), "--drain-seconds", "120"]
        with MillstreamUp(Path(home), *words) as up:
            up.wait_until_ready()
            for kind in ("steady", "spot"):
                _fleet(up, "set", kind, "2", "--model", "mock")
            wait_until(partial(_all_serve, up), PATIENCE_SECONDS)
            _wait_for_middle(_fleet(up, "machines"))
            streams = asyncio.run(_stream_all(up))
    assert any(each.attempts > 1 for each in streams), "the machines were not taken back in time"
    return streams


def _fleet(up: MillstreamUp, *words: str) -> list[dict[str, Any]]:
    done = run_millstream("fleet", *words, "--json", "--data-dir", str(up.home / "data"))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _wait_for_middle(machines: list[dict[str, Any]]) -> None:
    """Wait until streams that begin now are in their middle when the machines are taken back."""
    created = min(each["created_at"] for each in machines if each["type"] == "spot")
    time.sleep(max(0.0, created + RECLAIM_SECONDS - EARLY_SECONDS - time.time()))


def _all_serve(up: MillstreamUp) -> bool:
    answer = asyncio.run(RunningGateway(up.port, asyncio.Event()).request("GET", "/v1/models"))
    counts: list[int] = [card["workers"] for card in answer.json["data"]]
    return sum(counts) == 4


async def _stream_all(up: MillstreamUp) -> list[Stream]:
    client = RunningGateway(up.port, asyncio.Event())
    return list(await asyncio.gather(*(_stream(client, number) for number in range(STREAMS))))


async def _stream(client: RunningGateway, number: int) -> Stream:
    stream = Stream()
    async with client.socket() as socket:
        await socket.generate("s", prompt=f"stream {number}", max_tokens=TOKENS, seed=number)
        while True:
            frame = await socket.receive(PATIENCE_SECONDS)
            stream.take(frame, time.monotonic())
            if frame["type"] == "done":
                return stream
            assert frame["type"] != "error", frame

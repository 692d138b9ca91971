"""Measures a batch whose processes are all killed in turn, and checks what has come of it.

`LINES` lines of the mock model on one `millstream up` with four workers, of which some process is
killed every `KILL_SECONDS`: the broker, the gateway, the dispatcher, the jobs service, the admin
service and each worker. The supervisor starts them anew.
"""

import asyncio
import itertools
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench import reporting
from bench.batches import TENANT, WORDS, create_batch, gateway_client, make_lines
from bench.reporting import Figure, Run
from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.broker.broker_client import connect
from streams.messages import LedgerRecord
from tests.support.millstream_up import MillstreamUp

LINES = int(os.environ.get("MILLSTREAM_BENCH_LINES", "100000"))
KILL_SECONDS = 15.0
KILLED = ("nats-server", "worker", "jobs", "dispatcher", "worker", "gateway", "worker", "admin")
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_SECONDS = 1.0
BILLED_SECONDS = 60.0

FIGURES = (
    Figure("kills", "processes killed"),
    Figure("lost", f"lines of {LINES:,} that are in no file", "0"),
    Figure("doubled", "lines that are there twice", "0"),
    Figure("out_of_order", "lines that are not in the order of the input", "0"),
    Figure("failed", "lines in the error file"),
    Figure("unbilled", "answered lines without a ledger record", "0"),
    Figure("billed_twice", "requests with two ledger records", "0"),
    Figure("again_percent", "tokens computed again, at most, % of all", "≤ 1"),
    Figure("per_second", "lines/s"),
)


def measure(runs: int, seconds: float) -> None:
    """Measure `runs` times, each on a fresh `millstream up`, and publish; `seconds` has no effect.

    `MILLSTREAM_BENCH_LINES` sets another number of lines than 100,000.
    """
    setting = {"lines": LINES, "kill_seconds": KILL_SECONDS, "killed": KILLED}
    reporting.publish("jobs-killed", setting, FIGURES, [_run() for _ in range(runs)])


def _run() -> Run:
    with tempfile.TemporaryDirectory() as home, MillstreamUp(Path(home), *WORDS) as up:
        up.wait_until_ready()
        return asyncio.run(_run_batch(up))


async def _run_batch(up: MillstreamUp) -> Run:
    async with gateway_client(up.url) as client:
        batch = await create_batch(client, make_lines(LINES))
        began, kills = time.monotonic(), 0
        turns, killed_at = _victims(), began
        while (found := await _read_batch(client, batch))["status"] not in ENDED:
            if time.monotonic() - killed_at >= KILL_SECONDS:
                kills, killed_at = kills + _kill(up, next(turns)), time.monotonic()
            await asyncio.sleep(POLL_SECONDS)
        seconds = time.monotonic() - began
        assert found["status"] == "completed", found
        files = [await _read_file(client, found[f"{kind}_file_id"]) for kind in ("output", "error")]
    return {
        "kills": kills,
        **_check_lines(*files),
        **await _check_bills(up, len(files[0])),
        "per_second": LINES / seconds,
    }


def _victims() -> Iterator[tuple[str, int]]:
    """Process to kill: a word of its command line, and how many of those were killed before."""
    seen: Counter[str] = Counter()
    for word in itertools.cycle(KILLED):
        yield word, seen[word]
        seen[word] += 1


def _kill(up: MillstreamUp, victim: tuple[str, int]) -> int:
    """Kill one process; return how many there were, 0 or 1."""
    word, turn = victim
    if not (pids := up.pids(word)):  # it is just being started
        return 0
    os.kill(pids[turn % len(pids)], signal.SIGKILL)
    return 1


async def _read_batch(client: httpx.AsyncClient, batch: str) -> dict[str, Any]:
    """Return the batch, however long no gateway or broker answers."""
    while True:
        try:
            answer = await client.get(f"/v1/batches/{batch}")
            answer.raise_for_status()
        except httpx.HTTPError:
            await asyncio.sleep(POLL_SECONDS)
            continue
        found: dict[str, Any] = answer.json()
        return found


async def _read_file(client: httpx.AsyncClient, file: str | None) -> list[int]:
    """The indexes of the lines of a file of results."""
    if file is None:
        return []
    answer = await client.get(f"/v1/files/{file}/content")
    answer.raise_for_status()
    ids = (json.loads(line)["custom_id"] for line in answer.text.splitlines())
    return [int(each.removeprefix("id-")) for each in ids]


def _check_lines(output: list[int], errors: list[int]) -> dict[str, float]:
    found = Counter(output) + Counter(errors)
    pairs = [*itertools.pairwise(output), *itertools.pairwise(errors)]
    return {
        "lost": LINES - len(found),
        "doubled": sum(count - 1 for count in found.values()),
        "out_of_order": sum(later < sooner for sooner, later in pairs),
        "failed": len(errors),
    }


async def _check_bills(up: MillstreamUp, answered: int) -> dict[str, float]:
    """Compare the ledger with the lines; every attempt but the last counts as computed again."""
    async with connect(up.nats_url, "bench", up.files(UserClass.GATEWAY)) as broker:
        deadline = time.monotonic() + BILLED_SECONDS
        while True:
            found = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
            records = [LedgerRecord.unpack(message.data) for message in found]
            records = [each for each in records if each.tenant == TENANT]
            done = Counter(each.request_id for each in records if each.completion_tokens)
            if len(done) >= answered or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_SECONDS)
    again = sum(each.completion_tokens * (each.attempts - 1) for each in records if each.attempts)
    total = sum(each.completion_tokens for each in records)
    return {
        "unbilled": max(0, answered - len(done)),
        "billed_twice": sum(count - 1 for count in done.values()),
        "again_percent": 100 * again / total,
    }

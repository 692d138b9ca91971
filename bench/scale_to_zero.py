"""Measures models that rest at zero: how soon a wake is over, and what is lost while all is killed.

`zero` wakes the mock model again and again, on machines that boot in 9, 10 and 11 s. `zero-killed`
sends `REQUESTS` requests of ten tenants to a model at zero, and kills the gateway, the dispatcher,
the fleet service and the admin service in turn, the first three while it has no worker.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

from bench import reporting
from bench.reporting import Figure, Run
from millstream_client import Client, Done, MillstreamError
from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.broker.broker_client import connect
from streams.messages import LedgerRecord, RefusalCounts
from tests.support.millstream_up import KEY, MillstreamUp, wait_until

REQUESTS = int(os.environ.get("MILLSTREAM_BENCH_REQUESTS", "10000"))
TENANTS = 10
WAKES = int(os.environ.get("MILLSTREAM_BENCH_WAKES", "4"))  # of each boot time
BOOT_SECONDS = (9, 10, 11)
KILLED_BOOT_SECONDS = 30
KILL_SECONDS = 10.0
KILLED = ("fleet", "gateway", "dispatcher", "admin")
PATIENCE_SECONDS = 300.0

WAKE_FIGURES = (
    Figure("median_over_boot", "zero → first token, s over the boot, median", "≤ 0.5"),
    Figure("p90_over_boot", "the same, 90 of 100"),
    Figure("told_error_percent", "error of the time first told, %, 90 of 100", "≤ 20"),
    Figure("ordered_ms", "request → client told of the order, ms, median", "≤ 50"),
)
KILLED_FIGURES = (
    Figure("kills", "processes killed"),
    Figure("lost", f"requests of {REQUESTS:,} without an end", "0"),
    Figure("failed", "requests that ended with an error", "0"),
    Figure("refused", "requests that a gateway has refused", "0"),
    Figure("asked_again", "resumptions that were to try again while no leader could be asked"),
    Figure("billed_twice", "requests with two ledger records", "0"),
    Figure("unbilled", "answered requests without a ledger record", "0"),
    Figure("machines", "machines bought, of which 4 may be there at once"),
    Figure("seconds", "seconds until all had ended"),
)


def measure_wakes(runs: int, seconds: float) -> None:
    """Measure `runs` times `WAKES` wakes of each boot time, and publish; `seconds` has no effect.

    The first wake of an `up` tells a boot time alone, since no load has been measured then; it is
    not counted.
    """
    setting = {"boot_seconds": BOOT_SECONDS, "wakes": WAKES}
    reporting.publish("zero", setting, WAKE_FIGURES, [_run_wakes() for _ in range(runs)])


def measure_killed(runs: int, seconds: float) -> None:
    """Measure `runs` times, each on a fresh `millstream up`, and publish; `seconds` has no effect.

    `MILLSTREAM_BENCH_REQUESTS` sets another number of requests than 10,000.
    """
    setting = {
        "requests": REQUESTS,
        "tenants": TENANTS,
        "boot_seconds": KILLED_BOOT_SECONDS,
        "kill_seconds": KILL_SECONDS,
        "killed": KILLED,
    }
    reporting.publish("zero-killed", setting, KILLED_FIGURES, [_run_killed() for _ in range(runs)])


@contextmanager
def _fleet_up(boot_seconds: float, max_workers: int) -> Iterator[MillstreamUp]:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        config = home / "fleet.toml"
        keys = (f'[tenants.t{n}]\nkeys = ["{_key(n)}"]\n' for n in range(TENANTS))
        config.write_text(
            f"signal_window_seconds = 10\n[fleet]\nidle_seconds = 1\n"
            f"[fleet.models.mock]\nmax_workers = {max_workers}\n"
            f"[fleet.types.small]\nprice_per_hour = 0.6\nboot_seconds = {boot_seconds}\n"
            + "".join(keys)
        )
        own = ("--config", str(config), "--model", "mock", "--api-key", KEY)
        with MillstreamUp(home, *own) as up:
            yield up.wait_until_ready()


def _key(number: int) -> str:
    return f"sk-tenant-{number}"


# Wakes


def _run_wakes() -> Run:
    wakes = [wake for boot in BOOT_SECONDS for wake in _wake_repeatedly(boot)]
    over = [each["over_boot"] for each in wakes]
    return {
        "median_over_boot": median(over),
        "p90_over_boot": quantiles(over, n=10)[-1],
        "told_error_percent": quantiles([each["error"] for each in wakes], n=10)[-1],
        "ordered_ms": median(each["ordered_ms"] for each in wakes),
    }


def _wake_repeatedly(boot_seconds: float) -> list[dict[str, float]]:
    with _fleet_up(boot_seconds, 1) as up:
        found = []
        for _ in range(WAKES + 1):
            wait_until(lambda: not up.pids("millstream worker"), PATIENCE_SECONDS)
            found.append(asyncio.run(_wake(up.url, boot_seconds)))
    return found[1:]


async def _wake(url: str, boot_seconds: float) -> dict[str, float]:
    """Ask a model at zero; measure its first token, and what was told of the time until then."""
    async with Client(url, api_key=KEY, patience=PATIENCE_SECONDS) as client:
        began = time.monotonic()
        request = client.generate(model="mock", prompt="the old mill", max_tokens=1)
        async with request:
            while request.waking is None or request.waking.seconds_left is None:
                await asyncio.sleep(0.001)
            told_at, told = time.monotonic(), request.waking.seconds_left
            await anext(aiter(request))
            ended = time.monotonic()
    left = ended - told_at
    return {
        "over_boot": ended - began - boot_seconds,
        "error": 100 * abs(told - left) / left,
        "ordered_ms": 1000 * (told_at - began),
    }


# Kills


def _run_killed() -> Run:
    with _fleet_up(KILLED_BOOT_SECONDS, 4) as up:
        return asyncio.run(_send_and_kill(up))


async def _send_and_kill(up: MillstreamUp) -> Run:
    began, failures, kills = time.monotonic(), Counter[str](), 0
    sending = [asyncio.create_task(_send_tenant(up.url, n, failures)) for n in range(TENANTS)]
    for word in KILLED:
        await asyncio.wait(sending, timeout=KILL_SECONDS)
        for pid in up.pids(f"millstream {word}"):
            os.kill(pid, signal.SIGKILL)
            kills += 1
    await asyncio.wait(sending)
    done = sum(each.result() for each in sending)
    if failures:
        print(dict(failures))
    return {
        "kills": kills,
        "lost": REQUESTS - done - failures.total(),
        "failed": failures.total(),
        "machines": (up.home / "up.out").read_text().count('"state":"booting"'),
        "seconds": time.monotonic() - began,
        **await _check_ledger(up, done),
    }


async def _send_tenant(url: str, number: int, failures: Counter[str]) -> int:
    """Send a tenant's part of the requests at once; return how many were answered whole."""

    async def send(client: Client, index: int) -> int:
        request = client.generate(model="mock", prompt=f"{number} {index}", max_tokens=4)
        try:
            ended = await request.outcome()
        except MillstreamError as error:
            failures[f"{error.code}: {error}"] += 1
            return 0
        assert isinstance(ended, Done)
        return 1

    async with Client(url, api_key=_key(number), patience=PATIENCE_SECONDS) as client:
        count = REQUESTS // TENANTS
        return sum(await asyncio.gather(*(send(client, index) for index in range(count))))


async def _check_ledger(up: MillstreamUp, answered: int) -> dict[str, float]:
    """Compare the ledger with what was answered; count what gateways say that they refused."""
    async with connect(up.nats_url, "bench", up.files(UserClass.GATEWAY)) as broker:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            found = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
            records = Counter(LedgerRecord.unpack(each.data).request_id for each in found)
            if len(records) >= answered or time.monotonic() > deadline:
                break
            await asyncio.sleep(1)
        outcomes = await broker.read_subject(topology.LEDGER, subjects.ALL_OUTCOMES)
    refused = Counter[bool]()  # by whether they name a model: a resumption does not
    for each in outcomes:
        counts = RefusalCounts.unpack(each.data).counts
        refused[not each.subject.endswith(subjects.OTHER)] += sum(count for *_, count in counts)
    return {
        "refused": refused[True],
        "asked_again": refused[False],
        "billed_twice": sum(count - 1 for count in records.values()),
        "unbilled": max(0, answered - len(records)),
    }

"""A model at zero: its requests wait, wake it, and lose nothing, whatever is killed meanwhile."""

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from millstream_client import Client, Done
from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.broker.broker_client import connect
from streams.messages import LedgerRecord
from tests.support.eventually import eventually
from tests.support.millstream_up import KEY, MillstreamUp, is_gone, run_millstream, wait_until

TENANTS, REQUESTS = 10, 30
SECONDS = 60.0
TABLE = """
[fleet]
idle_seconds = 1
[fleet.models.mock]
max_workers = 2
[fleet.types.small]
price_per_hour = 0.6
boot_seconds = 4
"""


def tenant_key(number: int) -> str:
    return f"sk-tenant-{number}"


@contextmanager
def fleet_up(home: Path, table: str = TABLE) -> Iterator[MillstreamUp]:
    """An `up` with a fleet and ten tenants, whose signals forget after ten seconds."""
    home.mkdir(exist_ok=True)
    config = home / "fleet.toml"
    keys = (f'[tenants.t{n}]\nkeys = ["{tenant_key(n)}"]\n' for n in range(TENANTS))
    config.write_text("signal_window_seconds = 10\n" + table + "".join(keys))
    with MillstreamUp(home, "--config", str(config), "--model", "mock", "--api-key", KEY) as up:
        yield up.wait_until_ready()


def fleet(up: MillstreamUp, *words: str) -> list[Any]:
    """Objects that a `millstream fleet` command prints, one a line."""
    done = run_millstream("fleet", *words, "--json", "--data-dir", str(up.home / "data"))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kill(up: MillstreamUp, service: str) -> None:
    """Kill a service; return once another runs in its place."""
    (pid,) = up.pids(f"millstream {service}")
    os.kill(pid, 9)
    wait_until(lambda: is_gone(pid) and up.pids(f"millstream {service}"), SECONDS)


async def run_tenant(up: MillstreamUp, number: int, accepted: list[str]) -> list[Done]:
    """Send a tenant's requests at once, and return how each has ended."""

    async def run_one(client: Client, index: int) -> Done:
        request = client.generate(
            model="mock", prompt=f"{number} {index}", max_tokens=4, temperature=0
        )
        async with request:
            assert request.request_id
            accepted.append(request.request_id)
            ended = await request.outcome()
        assert isinstance(ended, Done)
        return ended

    async with Client(up.url, api_key=tenant_key(number), patience=SECONDS) as client:
        return list(await asyncio.gather(*(run_one(client, n) for n in range(REQUESTS))))


async def test_nothing_is_lost_or_doubled_while_every_service_is_killed(tmp_path: Path) -> None:
    """Requests wait in the broker, and the plan has an id before a machine is bought."""
    with fleet_up(tmp_path) as up:
        accepted: list[str] = []
        running = [asyncio.create_task(run_tenant(up, n, accepted)) for n in range(TENANTS)]
        await asyncio.to_thread(wait_until, lambda: accepted, SECONDS)
        for service in ("fleet", "gateway", "dispatcher", "admin", "fleet"):
            await asyncio.to_thread(kill, up, service)
        async with asyncio.timeout(2 * SECONDS):
            ended = [done for each in await asyncio.gather(*running) for done in each]
        assert len(ended) == TENANTS * REQUESTS
        assert {done.finish_reason for done in ended} == {"length"}

        async def all_billed() -> bool:
            return len(await billed(up)) == len(ended)

        await eventually(all_billed)
        assert set((await billed(up)).values()) == {1}
        starts = [each for each in fleet(up, "plan") if each["action"] == "start"]
        assert len(starts) <= 2, starts


async def billed(up: MillstreamUp) -> Counter[str]:
    """How many ledger records each request has."""
    async with connect(up.nats_url, "test", up.files(UserClass.GATEWAY)) as broker:
        found = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
    return Counter(LedgerRecord.unpack(message.data).request_id for message in found)


async def test_clients_are_told_how_far_a_wake_is_and_rest_follows(tmp_path: Path) -> None:
    """In frames, in comments that OpenAI's SDK does not see, and in `fleet why` afterwards."""
    with fleet_up(tmp_path) as up:
        phases: list[str] = []
        async with Client(up.url, api_key=KEY) as client:
            request = client.generate(
                model="mock", prompt="the old mill", max_tokens=4, temperature=0
            )
            async with request, asyncio.timeout(SECONDS):
                while request.started is None:
                    if request.waking and request.waking.phase not in phases:
                        phases.append(request.waking.phase)
                    await asyncio.sleep(0.01)
                cold = await request.text()
        assert set(phases) >= {"booting", "loading"}
        wait_until(lambda: not up.pids("millstream worker"), SECONDS)
        (why,) = fleet(up, "why", "mock")
        assert why["cold_start"]["load_seconds"] > 0
        assert [each["action"] for each in why["changes"]] == ["end", "start"]
        assert all(each["reason"] for each in why["changes"])
        body = json.dumps(
            {
                "model": "mock",
                "prompt": "the old mill",
                "max_tokens": 4,
                "temperature": 0,
                "stream": True,
            }
        )
        words = ("curl", "-sN", f"{up.url}/v1/completions", "-d", body)
        headers = ("-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json")
        raw = await asyncio.to_thread(
            subprocess.run, (*words, *headers), capture_output=True, text=True, timeout=SECONDS
        )
        assert ': waking {"phase":"booting","seconds_left":' in raw.stdout
        assert raw.stdout.rstrip().endswith("data: [DONE]")
        wait_until(lambda: not up.pids("millstream worker"), SECONDS)
        with OpenAI(base_url=f"{up.url}/v1", api_key=KEY) as openai:
            events = openai.completions.create(
                model="mock", prompt="the old mill", max_tokens=4, temperature=0, stream=True
            )
            told = await asyncio.to_thread(
                lambda: "".join(event.choices[0].text for event in events)
            )
        assert told == cold


def test_what_cannot_be_in_time_is_refused_and_others_wait(tmp_path: Path) -> None:
    """With the time that it takes; after a pause has begun, nothing is woken."""
    with fleet_up(tmp_path) as up, OpenAI(base_url=f"{up.url}/v1", api_key=KEY) as openai:
        quick = openai.with_options(max_retries=0)
        with pytest.raises(Exception, match="its first one is ready in 4.0 s, which is too late"):
            quick.completions.create(
                model="mock", prompt="a", max_tokens=1, extra_body={"deadline_ms": 2000}
            )
        (paused,) = fleet(up, "pause", "--for", "1m")
        assert paused["paused_until"] > 0
        (status,) = fleet(up, "status")
        assert status["paused_until"] == paused["paused_until"]
        fleet(up, "resume")
        answer = quick.completions.create(model="mock", prompt="a", max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 1

"""All services tell the time by the brokers' clock, whatever their own machines' say."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.broker import clock_sync, declaration
from streams.broker.clock_sync import sample_once
from streams.errors import BrokerUnavailable
from streams.messages import LedgerRecord, RefusalCounts
from tests.support.accounts_server import connect
from tests.support.eventually import eventually
from tests.support.gateways import KEY, RunningGateway, register
from tests.support.keys import operator, pepper_file
from tests.support.ports import free_port
from tests.support.service_process import ServiceProcess
from tests.support.services import MAX_QUEUED, service_settings

HOUR = 3600
DEAD = "infer.dead.acme.m"
WRONG = Path(__file__).parent / "wrong_clock"


async def test_the_shared_clock_is_the_brokers(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker notes when it stored a message: between what the clock said before and after."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    async with connect(nats_url, "test") as broker:
        await declaration.declare(broker, topology.Scale(), MAX_QUEUED)
        seen = await broker.sample_clock()
        broker.clock.add_sample(seen)
        before = broker.clock.now()
        stored = await broker.store(DEAD, b"x")
        after = broker.clock.now()
        (message,) = await broker.read(topology.DEAD, {"seq": stored.seq})
        at = datetime.fromisoformat(message.headers["Nats-Time-Stamp"]).timestamp()
        error = seen.max_error(broker.clock.ticks())
        assert before - error <= at <= after + error


async def test_the_clock_is_looked_at_now_and_then(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, and in spite of brokers that could not tell the time at first."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(clock_sync, "SAMPLE_SECONDS", 0.01)
    async with connect(nats_url, "test") as broker:
        assert broker.clock.now() < HOUR
        await declaration.declare(broker, topology.Scale(), MAX_QUEUED)
        await eventually(lambda: broker.clock.now() > HOUR)


async def test_nobody_tells_the_time_before_there_are_streams(nats_url: str) -> None:
    """Services ask again; a command for people says why it cannot do its work."""
    async with connect(nats_url, "test") as broker:
        with pytest.raises(BrokerUnavailable, match="the answer has no time"):
            await sample_once(broker)


@asynccontextmanager
async def hours_apart(nats_url: str, logs: Path) -> AsyncIterator[RunningGateway]:
    """A gateway and what it needs; each is a process with a wall clock that is wrong."""
    await register(nats_url, itl_ms=10)
    port, pepper = free_port(), pepper_file(logs)
    own: dict[str, tuple[int, dict[str, Any]]] = {
        "admin": (2 * HOUR, {"api_key": KEY}),
        "gateway": (-HOUR, {"port": port, "key_pepper_file": pepper}),
        "dispatcher": (HOUR, {}),
        "worker": (-2 * HOUR, {"model": "mock"}),
    }
    path = f"{WRONG}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with ExitStack() as stack:
        for kind, (off, settings) in own.items():
            environment = {"PYTHONPATH": path, "WALL_CLOCK_OFF": str(off)}
            told = service_settings(nats_url, UserClass(kind), ["mock"], **settings)
            service = ServiceProcess(kind, logs / f"{kind}.log", told, environment)
            stack.callback(service.kill)
        gateway = RunningGateway(port, asyncio.Event())
        await eventually(gateway.is_ready, 60)
        yield gateway


async def test_wall_clocks_that_are_hours_off_cost_no_request_its_time(
    nats_url: str, tmp_path: Path
) -> None:
    """Deadlines are kept, neither early nor late, and what is told of the times is right."""
    async with hours_apart(nats_url, tmp_path) as gateway, gateway.socket() as socket:
        await socket.generate("in time", max_tokens=20)
        last = (await socket.receive_rest("in time"))[-1]
        assert last["type"] == "done"
        assert last["timing"]["total"] < HOUR * 1000
        await socket.generate("late", max_tokens=4000, deadline_ms=3000)
        assert (await socket.receive_rest("late"))[-1]["code"] == "deadline_exceeded"


async def test_a_wall_clock_that_is_an_hour_off_lets_no_key_work_longer(
    nats_url: str, tmp_path: Path
) -> None:
    """By the gateway's own clock the key would work for another hour."""
    async with hours_apart(nats_url, tmp_path) as gateway, operator(nats_url) as op:
        lasting, _ = await op.create(tenant="default", expires_at=time.time() + HOUR / 2)
        ending, record = await op.create(tenant="default", expires_at=time.time() + HOUR / 2)

        async def status_of(key: str) -> int:
            return (await gateway.complete(key=key)).status

        async def has_status(key: str, wanted: int) -> bool:
            return await status_of(key) == wanted

        await eventually(lambda: has_status(ending, 200))
        await op.keys.change(record.id, {"expires_at": time.time() + 0.1}, time.time())
        await eventually(lambda: has_status(ending, 401))
        assert (await gateway.complete(key=ending)).error["code"] == "key_expired"
        assert await status_of(lasting) == 200


async def test_wall_clocks_that_are_hours_off_bill_at_the_right_time(
    nats_url: str, tmp_path: Path
) -> None:
    """The ledger's times are in order and the brokers' own, and so are the seconds of refusals."""
    async with hours_apart(nats_url, tmp_path) as gateway, connect(nats_url, "test") as broker:
        began = time.time()
        assert (await gateway.complete()).status == 200
        assert (await gateway.complete(model="nobody")).status == 404
        await eventually(lambda: broker.read_subject(topology.LEDGER, subjects.ALL_OUTCOMES))
        (bill,) = await broker.read_subject(topology.LEDGER, subjects.ALL_LEDGERS)
        (refused,) = await broker.read_subject(topology.LEDGER, subjects.ALL_OUTCOMES)
        latest = time.time() + 1
    record, counts = LedgerRecord.unpack(bill.data), RefusalCounts.unpack(refused.data)
    times = (began, record.accepted / 1000, record.first / 1000, record.finished / 1000, latest)
    assert all(earlier <= later + 1 for earlier, later in pairwise(times))
    assert began - 2 <= counts.since == counts.until <= latest

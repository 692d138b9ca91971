"""The fleet's signals are what was sent: counted exactly, refusals too, whoever dies."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NotFoundError

import dispatcher.service
import fleet.service
import gpu_worker.service
from fleet.settings import FleetSettings
from millstream.fleet import signals
from millstream.fleet.settings import SignalsSettings
from millstream.fleet.signals import FleetNotAnswering, request_signals
from registry.models import LatencyGoals, mock_model
from streams import messages, subjects, topology
from streams.accounts.access import UserClass
from streams.broker import declaration
from streams.broker.broker_client import Broker
from streams.messages import LedgerRecord
from streams.subjects import Priority
from tests.support.accounts_server import connect, process_files
from tests.support.eventually import eventually
from tests.support.gateways import RunningGateway, gateways, tenants
from tests.support.service_process import service_process
from tests.support.services import (
    command_settings,
    connect_operator,
    connect_worker,
    dispatcher_settings,
    opened_registry,
    running,
    service_settings,
    worker_settings,
)

ANSWERED, TOO_LONG, TOO_MANY = 12, 3, 4
WINDOW = 600
GOALS = {Priority.STANDARD: LatencyGoals(time_to_first_token_ms=600_000)}
CODE_TOO_LONG = "context_length_exceeded"


def fleet_settings(nats_url: str, **settings: Any) -> FleetSettings:
    told = {"signal_window_seconds": WINDOW, **settings}
    return FleetSettings(**service_settings(nats_url, UserClass.FLEET, **told))


@asynccontextmanager
async def cell(nats_url: str) -> AsyncIterator[RunningGateway]:
    """A cell with a worker of the type `small` for `mock`, and none for `cold`."""
    async with AsyncExitStack() as stack:
        told = tenants(max_queued=2)
        (gateway,) = await stack.enter_async_context(gateways(nats_url, tenants=told))
        broker = await stack.enter_async_context(connect(nats_url))
        registry = await stack.enter_async_context(opened_registry(broker))
        for name in ("mock", "cold"):
            model = mock_model(name, ttft_ms=1, itl_ms=1)
            await registry.add_model(model.model_copy(update={"goals": GOALS}))
        dispatching = dispatcher_settings(nats_url)
        await stack.enter_async_context(running(dispatcher.service, dispatching))
        working = worker_settings(nats_url, type="small")
        await stack.enter_async_context(running(gpu_worker.service, working))
        await eventually(gateway.is_ready)
        yield gateway


async def send_all(gateway: RunningGateway) -> None:
    """Answered ones, and ones that are refused before a queue is asked."""
    for _ in range(ANSWERED):
        assert (await gateway.complete("hello", max_tokens=8)).status == 200
    for _ in range(TOO_LONG):
        answer = await gateway.complete("hello", max_tokens=10**6)
        assert answer.error["code"] == CODE_TOO_LONG


async def read(broker: Broker) -> dict[str, Any] | None:
    """Report of the leader; None while there is none."""
    try:
        return await request_signals(broker)
    except FleetNotAnswering:
        return None


def signals_of(report: dict[str, Any], model: str, priority: str = "standard") -> dict[str, Any]:
    priorities = {each["model"]: each["priorities"] for each in report["models"]}
    found: Iterable[dict[str, Any]] = priorities.get(model, [])
    return next((row for row in found if row["priority"] == priority), {})


async def counted(broker: Broker, rounds: int) -> dict[str, Any] | None:
    """The report, once it has of `mock` as much as `send_all` has sent in so many rounds."""
    report = await read(broker)
    row = signals_of(report, "mock") if report else {}
    ended, refused = (sum(row.get(name, {}).values()) for name in ("ended", "refused"))
    return report if ended >= rounds * ANSWERED and refused >= rounds * TOO_LONG else None


async def has_queued(broker: Broker, model: str, count: int) -> bool:
    report = await read(broker)
    return bool(report and signals_of(report, model).get("queued") == count)


async def knows_worker(broker: Broker) -> bool:
    report = await read(broker)
    return bool(report and any(each["pools"] for each in report["models"]))


async def test_counts_are_those_of_what_was_sent_and_survive_the_leader(
    nats_url: str, tmp_path: Path
) -> None:
    """A killed leader's successor reads the same ledger, and so counts neither less nor twice."""
    log = tmp_path / "fleet-1.log"
    with service_process("fleet", nats_url, log, signal_window_seconds=WINDOW) as first:
        async with cell(nats_url) as gateway, connect_operator(nats_url) as broker:
            await send_all(gateway)
            check_counts(await eventually(partial(counted, broker, 1)), 1)
            log = tmp_path / "fleet-2.log"
            with service_process("fleet", nats_url, log, signal_window_seconds=WINDOW) as second:
                await eventually(partial(second.has_logged, "fleet_running"))
                first.kill()
                await eventually(partial(second.has_logged, "signals_collected"))
                await send_all(gateway)
                check_counts(await eventually(partial(counted, broker, 2)), 2)


def check_counts(report: dict[str, Any], rounds: int) -> None:
    row, answered = signals_of(report, "mock"), rounds * ANSWERED
    assert row["ended"] == {"length": answered}
    assert row["refused"] == {CODE_TOO_LONG: rounds * TOO_LONG}
    assert row["completion_tokens"] == 8 * answered
    assert row["prompt_tokens"] == 5 * answered
    goal = row["goal"]
    assert (goal["attained"], goal["missed"], row["attainment"]) == (answered, 0, 1.0)
    assert row["mean_queue_seconds"] >= 0


async def test_what_is_refused_for_want_of_capacity_is_told_apart(nats_url: str) -> None:
    """A full queue hides how much is asked for; a wrong request asks for nothing."""
    async with (
        cell(nats_url) as gateway,
        running(fleet.service, fleet_settings(nats_url)),
        connect_operator(nats_url) as broker,
        asyncio.TaskGroup() as tasks,
    ):
        waiting = [tasks.create_task(gateway.complete(model="cold")) for _ in range(2)]
        await eventually(partial(has_queued, broker, "cold", 2))
        for _ in range(TOO_MANY):
            assert (await gateway.complete(model="cold")).status in (429, 503)
        for _ in range(TOO_LONG):
            assert (await gateway.complete(model="cold", max_tokens=10**6)).status == 400

        async def is_whole() -> dict[str, Any] | None:
            report = await read(broker)
            row = signals_of(report, "cold") if report else {}
            told = sum(row.get("refused", {}).values())
            return row if told == TOO_MANY + TOO_LONG else None

        row = await eventually(is_whole)
        assert row["refused"][CODE_TOO_LONG] == TOO_LONG
        assert (row["goal"]["refused"], row["attainment"]) == (TOO_MANY, 0.0)
        assert row["requests_per_second"] is not None
        for task in waiting:
            task.cancel()


async def test_workers_are_told_by_type_and_gateways_by_their_load(nats_url: str) -> None:
    """Only living workers and gateways are reported."""
    async with (
        cell(nats_url) as gateway,
        running(fleet.service, fleet_settings(nats_url)),
        connect_operator(nats_url) as broker,
    ):
        await gateway.complete()
        await eventually(partial(knows_worker, broker))

        async def is_told() -> dict[str, Any] | None:
            report = await read(broker)
            if report is None or not report["gateways"]:
                return None
            return report if report["gateways"][0]["requests_per_second"] is not None else None

        report = await eventually(is_told)
        pools = {each["model"]: each["pools"] for each in report["models"]}
        assert [(pool["type"], pool["workers"]) for pool in pools["mock"]] == [("small", 1)]
        assert pools["cold"] == []
        (told,) = report["gateways"]
        assert told["loop_lag_seconds"] >= 0
        assert not told["draining"]


async def test_a_forged_record_or_beat_is_counted_nowhere(nats_url: str) -> None:
    """A stolen worker may write on its own subjects, and counts for its own model alone."""
    async with (
        cell(nats_url) as gateway,
        running(fleet.service, fleet_settings(nats_url)),
        connect_operator(nats_url) as broker,
        connect_worker(nats_url, "stolen") as worker,
    ):
        forged = LedgerRecord(
            *("r", "acme", "cold", "1", "stop", 1, 1, 1, "stolen", 1, 2), priority="standard"
        )
        await worker.store(subjects.ledger("acme", "mock"), forged.pack())
        await worker.store(subjects.ledger("acme", "mock"), b"nonsense")
        await worker.publish(subjects.fleet("mock", "stolen"), messages.pack({"worker": 7}))
        await send_all(gateway)
        report = await eventually(partial(counted, broker, 1))
        check_counts(report, 1)
        assert signals_of(report, "cold")["ended"] == {}


async def test_garbage_from_a_dispatcher_stops_nobody(nats_url: str) -> None:
    """Neither the fleet's collector nor a gateway, which both go on with sound reports."""
    async with (
        cell(nats_url) as gateway,
        running(fleet.service, fleet_settings(nats_url)),
        connect_operator(nats_url) as broker,
        connect(nats_url, "stolen", process_files(nats_url, UserClass.DISPATCHER, "d")) as thief,
    ):
        for garbage in (b"\xc1", messages.pack(7), messages.pack({"model": "mock"})):
            await thief.publish(subjects.pressure("mock"), garbage)
        await send_all(gateway)
        check_counts(await eventually(partial(counted, broker, 1)), 1)


async def test_a_ledger_that_was_lost_is_read_from_its_new_beginning(nats_url: str) -> None:
    """Its sequences begin anew; what was counted before stays until its time is over."""
    async with (
        cell(nats_url) as gateway,
        running(fleet.service, fleet_settings(nats_url)),
        connect_operator(nats_url) as broker,
        connect(nats_url) as observer,
    ):
        await send_all(gateway)
        await eventually(partial(counted, broker, 1))
        await observer.js.delete_stream(topology.LEDGER)
        await eventually(partial(has_stream, observer, topology.LEDGER))
        await send_all(gateway)
        check_counts(await eventually(partial(counted, broker, 2)), 2)


async def has_stream(broker: Broker, stream: str) -> bool:
    try:
        await declaration.stream_info(broker, stream)
    except NotFoundError:
        return False
    return True


async def is_shown(settings: SignalsSettings) -> bool:
    """Run the command; False while no service leads, as one that has just lost its lease."""
    with suppress(FleetNotAnswering):
        await signals.run(settings, asyncio.Event())
        return True
    return False


async def test_the_command_prints_the_report(
    nats_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As JSON for programs, as tables for people; and says so if nobody answers."""
    as_json = SignalsSettings(**command_settings(nats_url, json=True))
    async with cell(nats_url) as gateway:
        with pytest.raises(FleetNotAnswering, match="millstream fleet"):
            await signals.run(as_json, asyncio.Event())
        async with running(fleet.service, fleet_settings(nats_url)):
            await gateway.complete()
            async with connect_operator(nats_url) as broker:
                await eventually(partial(knows_worker, broker))
            capsys.readouterr()
            await eventually(partial(is_shown, as_json))
            report = json.loads(capsys.readouterr().out)
            assert report["window_seconds"] == WINDOW
            assert {each["model"] for each in report["models"]} == {"cold", "mock"}
            await eventually(partial(is_shown, SignalsSettings(**command_settings(nats_url))))
            shown = capsys.readouterr().out
            assert "Demand, over 600 s" in shown
            assert "small" in shown

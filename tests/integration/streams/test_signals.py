"""Signals are stored and then heard; what is none does nothing, wherever it comes from."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from gpu_worker.drain_controller import DrainController
from streams import signals, subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, StoreRefused, StreamMissing
from streams.broker.stream_reconciler import StreamReconciler
from streams.coordination import signal_handler
from streams.coordination.signal_handler import SignalHandler
from streams.topology import Scale
from tests.support.accounts_server import connect
from tests.support.eventually import eventually

CANCEL, LAST = subjects.cancel("acme", "0a"), subjects.cancel("acme", "ff")
RECORD = "infer.dead.acme.m"  # a subject of any other stream


@pytest.fixture
async def broker(nats_url: str) -> AsyncIterator[Broker]:
    async with connect(nats_url, "test") as broker:
        await declaration.declare(broker, Scale(), 10)
        yield broker


async def listen(broker: Broker) -> list[tuple[str, str]]:
    """The cancels that are obeyed from now on."""
    found: list[tuple[str, str]] = []

    async def on_cancel(cancelled: tuple[str, str]) -> None:
        found.append(cancelled)

    handler = SignalHandler(signals.parse_cancel, on_cancel)
    await broker.subscribe(subjects.heard(subjects.ALL_CANCELS), handler.receive)
    return found


def ignored(logged: list[MutableMapping[str, Any]]) -> int:
    return sum(event["count"] for event in logged if event["event"] == "signal_ignored")


async def test_a_signal_is_heard_once_it_is_stored(broker: Broker) -> None:
    """Of a header that the sender has set as well, the broker's comes last, and counts."""
    found = await listen(broker)
    await broker.store(CANCEL, b"", {"Nats-Stream": "x", "Nats-Subject": LAST})
    await eventually(lambda: found == [("acme", "0a")])


async def test_a_core_message_is_heard_as_well(broker: Broker) -> None:
    """A producer may publish its cancels without waiting for the acknowledgement."""
    found = await listen(broker)
    await broker.publish(CANCEL)
    await eventually(lambda: found == [("acme", "0a")])


async def test_what_a_deputy_sends_is_no_signal(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker sends its answer wherever the question says, with rights of its own."""
    monkeypatch.setattr(signal_handler, "LOG_SECONDS", 0.0)
    found, drain = await listen(broker), DrainController(broker, "w1")
    await drain.listen()
    stored = await broker.store(RECORD, signals.pack_drain(0))
    by_subject = f"$JS.API.DIRECT.GET.{topology.DEAD}"
    with capture_logs() as logged:
        for signal in (CANCEL, subjects.drain("w1")):
            for target in (signal, subjects.heard(signal)):
                await broker.publish(RECORD, b"", reply=target)  # its acknowledgement
            heard = subjects.heard(signal)
            for seq in (stored.seq, stored.seq + 100):  # a stored order, and an empty answer
                await broker.publish(by_subject, orjson.dumps({"seq": seq}), reply=heard)
        await eventually(lambda: ignored(logged) == 8)
        await broker.store(LAST, b"")
        await eventually(lambda: found)
    assert found == [("acme", "ff")]
    assert not drain.started.is_set()


async def test_much_nonsense_is_one_event(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may send signals must not fill the disk with them."""
    monkeypatch.setattr(signal_handler, "LOG_SECONDS", 3600.0)
    found = await listen(broker)
    with capture_logs() as logged:
        for _ in range(500):
            await broker.publish(CANCEL, b"nonsense")
        await broker.store(LAST, b"")
        await eventually(lambda: found)
    assert ignored(logged) == 1


async def test_a_full_stream_passes_on_what_comes(broker: Broker) -> None:
    """It drops the oldest signals, which were heard when they were stored."""
    found = await listen(broker)
    size, body = 0, bytes(topology.MAX_SIGNAL_BYTES // 2)
    while size <= topology.SIGNALS_BYTES:
        sent = [broker.store(CANCEL, body) for _ in range(500)]
        await asyncio.gather(*sent)
        size += len(sent) * len(body)
    await broker.store(LAST, b"")
    await eventually(lambda: found == [("acme", "ff")])


async def test_the_sender_knows_of_a_signal_that_nobody_takes(broker: Broker) -> None:
    """Too large a one, and any while the stream is missing, which its declarer makes anew."""
    with pytest.raises(StoreRefused, match="size"):
        await broker.store(CANCEL, bytes(topology.MAX_SIGNAL_BYTES + 1))
    await broker.js.delete_stream(topology.SIGNALS)
    with pytest.raises(StreamMissing):
        await broker.store(CANCEL, b"")
    found = await listen(broker)
    reconciler = StreamReconciler(
        broker, Scale(), lambda: topology.stream_configs(Scale(), 10), lambda: True
    )
    keeping = asyncio.create_task(reconciler.run())
    await broker.store_retrying(CANCEL, b"", {}, seconds=60)
    await eventually(lambda: found)
    keeping.cancel()
    await asyncio.wait([keeping])

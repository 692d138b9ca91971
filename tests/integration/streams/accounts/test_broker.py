"""`Broker` with the credentials of a class: the same calls as without accounts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.broker import clock_sync, declaration
from streams.broker.broker_client import Broker, connect
from streams.connection_files import ConnectionFiles
from streams.subjects import PoolKey, Priority
from tests.support.accounts_cell import AccountsCell
from tests.support.accounts_server import process_files
from tests.support.eventually import eventually

POOL = PoolKey("mock", "v1", Priority.BATCH)


@asynccontextmanager
async def broker_of(cell: AccountsCell, user_class: UserClass, name: str) -> AsyncIterator[Broker]:
    file = cell.directory.add_user(name, user_class)
    async with connect(cell.nodes[-1].url, name, ConnectionFiles(creds=file)) as broker:
        yield broker


async def test_the_admin_service_declares_streams_of_both_stores(cell: AccountsCell) -> None:
    """It looks for each where it is, updates it there, and reads it."""
    async with broker_of(cell, UserClass.ADMIN, "admin-1") as admin:
        for _ in range(2):
            await declaration.declare(admin, topology.Scale(), max_queued=10)
        assert await declaration.declare(admin, topology.Scale(), max_queued=20) == 20
        await clock_sync.sync_clock(admin)
        async with broker_of(cell, UserClass.DISPATCHER, "d1") as dispatcher:
            await clock_sync.sync_clock(dispatcher)
            stored = await dispatcher.store("infer.ledger.acme.mock", b"record")
        ledger = await declaration.stream_info(admin, topology.LEDGER)
        assert ledger.state.last_seq == stored.seq
        assert await declaration.list_streams(admin, "infer.request.*.*.*") == [topology.REQUESTS]
        with pytest.raises(NotFoundError):
            await declaration.stream_info(admin, "INGRESS_acme")


async def test_many_may_come_at_once_to_a_server_that_has_just_started(nats_url: str) -> None:
    """It lets users in before it has all that their account imports, as the JetStream API is."""
    files = process_files(nats_url, UserClass.GATEWAY, "g1")
    async with AsyncExitStack() as stack:
        opened = (connect(nats_url, f"g{number}", files) for number in range(20))
        brokers = await asyncio.gather(*(stack.enter_async_context(each) for each in opened))
        assert all(broker.is_connected for broker in brokers)


async def test_a_subscription_that_a_server_has_taken_in_vain_is_made_again(
    cell: AccountsCell,
) -> None:
    """A server that has just started may take it before it has what the account imports."""
    heard = asyncio.Event()

    async def hear(_: Msg) -> None:
        heard.set()

    async with (
        broker_of(cell, UserClass.GATEWAY, "g1") as gateway,
        broker_of(cell, UserClass.DISPATCHER, "d1") as dispatcher,
    ):
        await gateway.subscribe("infer.pressure.>", hear)
        for sid in list(gateway.client._subs):
            await gateway.client._send_command(f"UNSUB {sid}\r\n".encode())

        async def is_heard() -> bool:
            await dispatcher.publish("infer.pressure.mock")
            return heard.is_set()

        await eventually(is_heard)


@pytest.mark.parametrize("user_class", [UserClass.ADMIN, UserClass.OPERATOR])
async def test_whoever_may_reads_stored_messages(
    declared: AccountsCell, user_class: UserClass
) -> None:
    """By sequence, by subject, and from the leader, which says what certainly is not there."""
    async with (
        broker_of(declared, UserClass.DISPATCHER, "d1") as dispatcher,
        broker_of(declared, user_class, "reader") as reader,
    ):
        letter = await dispatcher.store("infer.dead.acme.mock", b"letter")
        found = await reader.get(topology.DEAD, letter.seq)
        assert found
        assert found.data == b"letter"
        assert await reader.get(topology.DEAD, letter.seq + 1) is None
        (read,) = await reader.read_subject(topology.DEAD, "infer.dead.acme.mock")
        assert read.seq == letter.seq
        assert await reader.remove(topology.DEAD, letter.seq)
        assert await reader.get(topology.DEAD, letter.seq) is None


async def test_a_worker_makes_its_consumer_and_a_dispatcher_looks_at_it(
    declared: AccountsCell,
) -> None:
    """Both ask as if there were one store."""
    config = topology.work_consumer(POOL, 10)
    async with (
        broker_of(declared, UserClass.WORKER, "w1") as worker,
        broker_of(declared, UserClass.DISPATCHER, "d1") as dispatcher,
    ):
        await declaration.declare_consumer(worker, topology.WORK, config)
        await dispatcher.store(subjects.work(POOL), b"work")
        info = await declaration.consumer_info(dispatcher, topology.WORK, config.name or "")
        assert info
        assert info.num_pending == 1

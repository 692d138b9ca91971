"""Keys are replaced under load: appends and pulls go on, whatever is killed on the way."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millstream.broker import rotation_commands
from millstream.broker.rotation_settings import RotationSettings
from streams import subjects, topology
from streams.accounts.access import UserClass
from streams.accounts.credentials_file import read_credentials
from streams.accounts.key_rotation import KeyRotation, RotationRefused
from streams.broker import declaration, reconnecting_client
from streams.broker.account_claims import push_claims
from streams.broker.broker_client import Broker, connect
from streams.broker.pull_loop import Delivery, PullLoop
from streams.connection_files import ConnectionFiles
from streams.headers import MESSAGE_ID
from streams.subjects import PoolKey, Priority
from tests.support.accounts_cell import AccountsCell
from tests.support.eventually import eventually

POOL = PoolKey("mock", "v1", Priority.BATCH)
APPEND_SECONDS = 60.0  # a process of this machine may stall, and the server is restarted


class Load:
    """Appends by one process and pulls by another; `failed` has the appends that were given up."""

    def __init__(self) -> None:
        self.stored = 0
        self.pulled: set[str] = set()
        self.failed: list[str] = []
        self.is_over = False

    async def append(self, broker: Broker) -> None:
        while not self.is_over:
            name = str(self.stored)
            try:
                await broker.store_retrying(
                    subjects.work(POOL), name.encode(), {MESSAGE_ID: name}, APPEND_SECONDS
                )
            except Exception as error:
                self.failed.append(repr(error))
            self.stored += 1

    async def flows(self) -> None:
        """Return when ten more messages have been appended, and pulled."""
        wanted = {str(number) for number in range(self.stored + 10)}
        await eventually(lambda: wanted <= self.pulled)

    async def ends(self) -> None:
        """Return when everything that was appended has been pulled."""
        self.is_over = True
        await eventually(lambda: not self.missing())

    def missing(self) -> set[str]:
        return {str(number) for number in range(self.stored)} - self.pulled


@pytest.fixture
async def load(cell: AccountsCell, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Load]:
    """A dispatcher that appends to the stored stream WORK, and a worker that pulls from it."""
    monkeypatch.setattr(reconnecting_client, "FILE_CHECK_SECONDS", 0.2)
    cell.directory.add_user("system", UserClass.SYSTEM)
    async with _broker(cell, UserClass.ADMIN, "admin-1") as admin:
        await declaration.declare(admin, topology.Scale(), max_queued=100_000)
    made = Load()
    async with (
        _broker(cell, UserClass.DISPATCHER, "d1") as dispatcher,
        _broker(cell, UserClass.WORKER, "w1") as worker,
        _pulling(worker, made),
    ):
        task = asyncio.create_task(made.append(dispatcher))
        yield made
        made.is_over = True
        await task


@asynccontextmanager
async def _broker(cell: AccountsCell, user_class: UserClass, name: str) -> AsyncIterator[Broker]:
    file = cell.directory.add_user(name, user_class)
    async with connect(cell.nodes[0].url, name, ConnectionFiles(creds=file)) as broker:
        yield broker


@asynccontextmanager
async def _pulling(worker: Broker, load: Load) -> AsyncIterator[None]:
    acks: asyncio.Queue[Delivery] = asyncio.Queue()

    async def settle() -> None:
        while True:
            delivery = await acks.get()
            load.pulled.add(delivery.data.decode())
            await delivery.ack()

    config = topology.work_consumer(POOL, 10)
    await declaration.declare_consumer(worker, topology.WORK, config)
    pull = PullLoop(worker, topology.WORK, config.name or "", lambda: 100, acks.put_nowait)
    tasks = [asyncio.create_task(each) for each in (pull.run(), settle())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _settings(cell: AccountsCell, what: str, **more: object) -> RotationSettings:
    path = cell.directory.path
    return RotationSettings.model_validate(
        {"directory": path, "what": what, "nats": cell.nodes[0].url, **more}
    )


async def rotate(cell: AccountsCell, what: str, **more: object) -> None:
    await rotation_commands.rotate(_settings(cell, what, **more), asyncio.Event())


async def rotate_and_die(cell: AccountsCell, what: str, *options: str) -> None:
    """Run the command as a process, and kill it as soon as it has written which keys there are."""
    known = KeyRotation.open(cell.directory.path).read()
    command = ["-m", "millstream", "broker", "rotate", str(cell.directory.path)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--what", what, "--nats", cell.nodes[0].url, *options
    )
    await eventually(lambda: KeyRotation.open(cell.directory.path).read() != known)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _finishes(cell: AccountsCell) -> bool:
    """False while somebody is connected with old credentials."""
    with contextlib.suppress(RotationRefused):
        await rotate(cell, "accounts", finish=True)
        return True
    return False


async def test_all_keys_are_replaced_under_load(cell: AccountsCell, load: Load) -> None:
    """Of accounts, users and the operator; each step is killed half-way and repeated."""
    keys = KeyRotation.open(cell.directory.path)
    before, old = keys.read(), read_credentials(keys.user_file("d1"), 0)
    await load.flows()

    await rotate_and_die(cell, "accounts")
    await rotate(cell, "accounts")
    await load.flows()
    with pytest.raises(RotationRefused, match=r"d1\.creds"):
        await rotate(cell, "accounts", finish=True)
    await rotate(cell, "users")
    await eventually(lambda: _finishes(cell))
    await load.flows()
    assert not await cell.is_let_in(old)
    assert await cell.is_let_in(read_credentials(keys.user_file("d1"), 0))

    await rotate_and_die(cell, "operator")
    await rotate(cell, "operator")
    with pytest.raises(RotationRefused, match="n0 does not know the operator's key"):
        await rotate(cell, "operator", finish=True)
    cell.nodes[0].restart()
    await load.flows()
    await rotate_and_die(cell, "operator", "--finish")
    await rotate(cell, "operator", finish=True)
    cell.nodes[0].restart()
    await rotate(cell, "accounts")  # what the new key alone has signed is taken
    await load.flows()

    after = keys.read()
    assert not set(before.operator_signing) & set(after.operator_signing)
    assert all(
        not set(before.accounts[n].signing) & set(s.signing) for n, s in after.accounts.items()
    )
    assert load.failed == []
    await load.ends()


async def test_connections_with_old_credentials_hold_up_the_end(cell: AccountsCell) -> None:
    """Nobody is cut off without a word; with --cut, whoever has stolen them is."""
    thief = read_credentials(cell.directory.add_user("d1", UserClass.DISPATCHER), 0)
    cell.directory.add_user("system", UserClass.SYSTEM)
    async with cell.connected(thief) as client:
        await rotate(cell, "accounts")
        await rotate(cell, "users")
        with pytest.raises(RotationRefused, match="connection .* still use credentials"):
            await rotate(cell, "accounts", finish=True)
        assert client.is_connected
        await rotate(cell, "accounts", finish=True, cut=True)
        await client.was_closed.wait()
    assert not await cell.is_let_in(thief)


async def tell_tenants(cell: AccountsCell) -> None:
    """Do what an admin service does once it has the new keys."""
    async with cell.client(UserClass.SYSTEM, "system") as system:
        for token in cell.directory.account_tokens():
            await push_claims(system, token)


async def test_tenants_that_depend_on_old_keys_hold_up_the_end(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named, though nobody is connected; signed anew, they stay in."""
    monkeypatch.setattr(rotation_commands, "TENANTS_SECONDS", 0.5)
    cell.directory.add_user("system", UserClass.SYSTEM)
    async with cell.client(UserClass.SYSTEM, "system") as system:
        await push_claims(system, cell.directory.add_tenant("acme"))
        await push_claims(system, cell.directory.disable_tenant("acme"))
        await push_claims(system, cell.directory.add_tenant("beta"))
    await rotate(cell, "accounts")
    await rotate(cell, "users")
    with pytest.raises(RotationRefused, match=r"T_acme, T_beta \(2 in all\) would be cut off"):
        await rotate(cell, "accounts", finish=True)
    await tell_tenants(cell)
    await rotate(cell, "accounts", finish=True)
    assert await cell.is_let_in(cell.directory.tenant_credentials("beta"))

    await rotate(cell, "operator")
    cell.nodes[0].restart()
    await eventually(lambda: cell.has_servers(1))
    with pytest.raises(RotationRefused, match=r"T_acme, T_beta .* still signed by keys"):
        await rotate(cell, "operator", finish=True)
    await tell_tenants(cell)
    await rotate(cell, "operator", finish=True)
    cell.nodes[0].restart()
    assert await cell.is_let_in(cell.directory.tenant_credentials("beta"))


async def test_tenants_are_cut_off_if_that_is_wanted(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds for one whose account no admin service knows any more."""
    monkeypatch.setattr(rotation_commands, "TENANTS_SECONDS", 0.5)
    cell.directory.add_user("system", UserClass.SYSTEM)
    async with cell.client(UserClass.SYSTEM, "system") as system:
        await push_claims(system, cell.directory.add_tenant("acme"))
    await rotate(cell, "accounts")
    await rotate(cell, "users")
    with pytest.raises(RotationRefused, match="T_acme"):
        await rotate(cell, "accounts", finish=True)
    await rotate(cell, "accounts", finish=True, cut=True)


async def test_every_server_is_told(
    three: AccountsCell, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator's key is not used before each server can know it, also one that is down."""
    three.directory.add_user("system", UserClass.SYSTEM)
    await rotate(three, "accounts", as_json=True)
    assert json.loads(capsys.readouterr().out)["told"] == ["n0", "n1", "n2"]
    await rotate(three, "operator")
    three.nodes[2].kill()
    await eventually(lambda: three.has_servers(2))
    with pytest.raises(RotationRefused, match="n2 does not answer"):
        await rotate(three, "operator", finish=True)
    three.nodes[2].start()
    await eventually(lambda: three.has_servers(3))
    with pytest.raises(RotationRefused, match="n0, n1 does not know the operator's key"):
        await rotate(three, "operator", finish=True)

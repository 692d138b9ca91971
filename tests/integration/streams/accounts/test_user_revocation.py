"""`millstream broker revoke`: a stolen file is good for nothing, at any server, and stays so."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from millstream.broker import revocation_commands, rotation_commands
from millstream.broker.rotation_settings import RotationSettings
from millstream.broker.settings import RevokeSettings
from millstream.broker.store_connections import StoresClosed
from streams.accounts.access import UserClass
from streams.accounts.cell_directory import CellDirectory, InvalidCellDirectory
from streams.accounts.credentials_file import UserCredentials, read_credentials
from streams.accounts.rights import Pins
from streams.broker import reconnecting_client
from streams.broker.account_claims import ClaimsOutdated
from streams.broker.broker_client import connect
from streams.connection_files import ConnectionFiles
from tests.support.accounts_cell import AccountsCell
from tests.support.eventually import eventually


async def revoke(cell: AccountsCell, name: str, directory: Path | None = None, **o: bool) -> None:
    living = [node.url for node in cell.nodes if node.process.poll() is None]
    told = {"directory": directory or cell.directory.path, "name": name, "nats": ",".join(living)}
    settings = RevokeSettings.model_validate({**told, **o})
    await revocation_commands.revoke(settings, asyncio.Event())


def add_worker(cell: AccountsCell, name: str = "w1") -> UserCredentials:
    return read_credentials(cell.directory.add_user(name, UserClass.WORKER), now=0)


async def is_out(cell: AccountsCell, user: UserCredentials, node: int) -> bool:
    return not await cell.is_let_in(user, node)


async def test_a_stolen_file_is_cut_off_everywhere(
    three: AccountsCell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Live connections at all servers; others stay, and the same name is made anew."""
    stolen, other = add_worker(three), add_worker(three, "w2")
    async with (
        three.connected(stolen, 0) as first,
        three.connected(stolen, 2) as second,
        three.connected(other, 1) as bystander,
    ):
        await revoke(three, "w1", as_json=True)
        await first.was_closed.wait()
        await second.was_closed.wait()
        assert bystander.is_connected
    told = json.loads(capsys.readouterr().out)
    assert (told["user"], told["account"]) == (stolen.user, "WORKERS")
    assert (told["told"], told["silent"]) == (["n0", "n1", "n2"], [])
    assert not three.directory.user_file("w1").exists()
    again = add_worker(three)
    assert again.user != stolen.user
    for node in range(3):
        assert not await three.is_let_in(stolen, node)
        assert await three.is_let_in(again, node)


async def test_a_server_that_was_down_lets_nobody_in_for_long(
    three: AccountsCell, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts with claims from before, of its disk and its configuration, and asks the others."""
    stolen = add_worker(three)
    old = (three.directory.path / "nodes/n2.conf").read_text()
    three.nodes[2].kill()
    await eventually(lambda: three.has_servers(2))
    await revoke(three, "w1")
    assert "n2: no answer; asks the others when it is back" in capsys.readouterr().out
    three.directory.write_node("n2", old)
    three.nodes[2].start()
    await eventually(lambda: three.has_servers(3))
    await eventually(lambda: is_out(three, stolen, 2))
    for node in range(2):
        assert not await three.is_let_in(stolen, node)


async def test_no_older_claim_brings_a_user_back(cell: AccountsCell, tmp_path: Path) -> None:
    """Neither a copy of its file, nor one of the whole directory, nor a start of the server."""
    stolen = add_worker(cell)
    copy = shutil.copytree(cell.directory.path, tmp_path / "copy")
    await revoke(cell, "w1")
    shutil.copy(copy / "users/w1.creds", cell.directory.path / "users/w1.creds")
    assert add_worker(cell).user != stolen.user
    with pytest.raises(ClaimsOutdated, match="WORKERS.*older copy.*nothing was changed"):
        await revoke(cell, "w1", copy)
    rotation = {"directory": copy, "what": "accounts", "nats": cell.nodes[0].url}
    system = cell.directory.add_user("system", UserClass.SYSTEM)
    settings = RotationSettings.model_validate({**rotation, "nats_creds": system})
    with pytest.raises(ClaimsOutdated, match="older copy"):
        await rotation_commands.rotate(settings, asyncio.Event())
    CellDirectory.create(cell.directory.path, shards=1)  # as `broker init` and `up` do again
    cell.nodes[0].kill()
    cell.lose_accounts(0)
    cell.nodes[0].start()
    assert not await cell.is_let_in(stolen)
    assert await cell.is_let_in(add_worker(cell))


async def test_a_process_goes_on_with_its_next_file(
    cell: AccountsCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --renew, without a restart: pins stay, and the thief is out."""
    monkeypatch.setattr(reconnecting_client, "FILE_CHECK_SECONDS", 0.2)
    pins = Pins("w1", (("mock", "*"),))
    file = cell.directory.add_user("w1", UserClass.WORKER, pins)
    stolen = read_credentials(file, now=0)
    with capture_logs():
        async with connect(cell.nodes[0].url, "w1", ConnectionFiles(creds=file)) as broker:
            await revoke(cell, "w1", renew=True)
            new = read_credentials(file, now=0)
            await eventually(lambda: has_key(broker.client.identity, new.user))
            await eventually(lambda: broker.is_connected)
    assert not await cell.is_let_in(stolen)
    assert await cell.is_let_in(new)


def has_key(identity: object, user: str) -> bool:
    return getattr(getattr(identity, "key", None), "public", "") == user


async def test_the_user_that_tells_the_servers_is_revoked_like_others(cell: AccountsCell) -> None:
    """The command has a user of its own for that."""
    stolen = read_credentials(cell.directory.add_user("system", UserClass.SYSTEM), now=0)
    await revoke(cell, "system")
    assert not await cell.is_let_in(stolen)


async def test_what_cannot_be_revoked_is_told(cell: AccountsCell, tmp_path: Path) -> None:
    """A name that nobody has, and keys of other servers."""
    add_worker(cell)
    with pytest.raises(InvalidCellDirectory, match="has no user 'w9': there is .*w1.*--withdraw"):
        await revoke(cell, "w9")
    other = CellDirectory.create(tmp_path / "other", shards=1)
    other.add_user("w1", UserClass.WORKER)
    with pytest.raises(StoresClosed, match=f"lets nobody in by the keys in {other.path}"):
        await revoke(cell, "w1", other.path)

"""`millstream audit`: what was changed is shown, checked and taken away as files."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from millstream.admin.admin_client import AdminRefused, HttpAdminClient
from millstream.audit.commands import export, run
from millstream.audit.exported_files import NothingExported, list_files
from millstream.audit.settings import AuditExportSettings, AuditSettings
from millstream.broker.backup_commands import backup, restore
from millstream.broker.backup_settings import BackupSettings, RestoreSettings
from streams import subjects, topology
from streams.records.audit_chain import GENESIS, AuditEvent, AuditRecord, ChainBroken
from tests.support.accounts_server import connect
from tests.support.admins import ADMIN_KEY, running_admin
from tests.support.eventually import eventually
from tests.support.nats_server import NatsServer

STOP = asyncio.Event()
NOWHERE = {"admin": "http://127.0.0.1:1"}
Door = dict[str, str]


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[HttpAdminClient]:
    with capture_logs():
        async with running_admin(nats_url) as found:
            await found.call("tenants.add", name="bar", weight=3)
            await found.call("tenants.change", name="bar", weight=4)
            yield found


@pytest.fixture
def door(client: HttpAdminClient) -> Door:
    """The settings by which a command finds the admin service."""
    return door_of(client)


def door_of(client: HttpAdminClient) -> Door:
    return {"admin": client.url, "admin_key": ADMIN_KEY}


async def shown(door: Door, capsys: pytest.CaptureFixture[str], **told: Any) -> list[str]:
    capsys.readouterr()
    await run(AuditSettings.model_validate({**door, **told}), STOP)
    return capsys.readouterr().out.splitlines()


async def head(door: Door, capsys: pytest.CaptureFixture[str], **told: Any) -> str:
    (line,) = await shown(door, capsys, verify=True, json=True, **told)
    found: str = json.loads(line)["head"]
    return found


async def exported(door: Door, capsys: pytest.CaptureFixture[str], path: Path) -> Any:
    capsys.readouterr()
    settings = {**door, "directory": path, "json": True}
    await export(AuditExportSettings.model_validate(settings), STOP)
    return json.loads(capsys.readouterr().out)


async def test_an_operator_reads_what_was_changed(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, or as JSON for programs; chosen by who, what and when."""
    lines = await shown(door, capsys, what="tenants.change")
    assert len(lines) == 2
    assert "admin-key@127.0.0.1 tenants.change tenant bar: weight 3.0 -> 4.0 (change" in lines[0]
    assert "tenant bar: done (change" in lines[1]
    (first,) = await shown(door, capsys, limit=1, json=True)
    assert json.loads(first)["after"] == {"name": "bar", "weight": 3.0, "source": "api"}
    assert len(await shown(door, capsys, after=json.loads(first)["sequence"])) == 3
    assert await shown(door, capsys, who="nobody") == []
    assert await shown(door, capsys, since="2099-01-01") == []
    assert len(await shown(door, capsys, since="2020-01-01T12:00")) == 4


async def test_an_archive_that_is_not_there_is_not_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory without records, such as a mistyped one, proves nothing."""
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(NothingExported, match="has no file of `millstream audit export`"):
            await head(NOWHERE, capsys, directory=directory)


async def test_what_is_changed_is_followed(
    door: Door, client: HttpAdminClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until it is stopped."""
    stop, lines = asyncio.Event(), list[str]()
    settings = AuditSettings.model_validate({**door, "follow": True, "json": True})
    following = asyncio.create_task(run(settings, stop))

    def has_seen(name: str) -> bool:
        lines.extend(capsys.readouterr().out.splitlines())
        return any(json.loads(line)["target"] == f"tenant {name}" for line in lines)

    await eventually(lambda: has_seen("bar"))
    await client.call("tenants.add", name="late")
    await eventually(lambda: has_seen("late"))
    stop.set()
    await following


async def test_the_chain_is_checked_to_the_head_that_was_kept(
    nats_url: str, door: Door, client: HttpAdminClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head that is not in it is a log that was made anew, or cut."""
    kept = await head(door, capsys)
    await client.call("tenants.remove", name="bar")
    assert await head(door, capsys, head=[kept]) != kept
    sequence = int(kept.partition(":")[0])
    with pytest.raises(ChainBroken, match=f"record {sequence}"):
        await head(door, capsys, head=[f"{sequence}:{GENESIS}"])
    with pytest.raises(ChainBroken, match="it is missing"):
        await head(door, capsys, head=[f"{sequence + 9}:{GENESIS}"])
    async with connect(nats_url, "test") as broker:  # with the rights of the admin service
        forged = AuditRecord(AuditEvent.DONE, "c", "eve", "x", "tenant bar")
        await broker.store(subjects.audit("tenant"), forged.encode(sequence + 3, GENESIS, 0))
    with pytest.raises(ChainBroken) as broken:
        await head(door, capsys)
    assert broken.value.sequence == sequence + 3


async def test_it_is_exported_once_and_checked_without_a_broker(
    nats_url: str,
    door: Door,
    client: HttpAdminClient,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Each run adds what is new; a copy that somebody has changed is found."""
    path = tmp_path / "audit"
    assert (await exported(door, capsys, path))["exported"] == 4
    assert (await exported(door, capsys, path))["exported"] == 0
    await client.call("tenants.remove", name="bar")
    last = await exported(door, capsys, path)
    assert (last["exported"], last["head"]) == (2, await head(door, capsys))
    files = list_files(path)
    assert len(files) == 2
    async with connect(nats_url, "test") as broker:
        stored = await broker.read_subject(topology.AUDIT, subjects.ALL_AUDIT)
    assert [line for file in files for line in file.read()] == [m.data for m in stored]
    assert await head(NOWHERE, capsys, directory=path) == last["head"]
    first = files[0].path
    first.write_bytes(first.read_bytes().replace(b'"weight":3.0', b'"weight":9.0'))
    with pytest.raises(ChainBroken) as broken:
        await head(NOWHERE, capsys, directory=path)
    assert broken.value.sequence == stored[1].seq


async def test_an_export_does_not_go_on_in_another_log(
    nats_url: str,
    door: Door,
    client: HttpAdminClient,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """That would hide that the first one is gone."""
    await exported(door, capsys, tmp_path)
    async with connect(nats_url, "test") as broker:
        await broker.js.delete_stream(topology.AUDIT)

        async def is_made_anew() -> bool:
            with suppress(AdminRefused):  # while there is no log
                await client.call("tenants.change", name="bar", weight=7)
                return len(await shown(door, capsys)) >= 2
            return False

        await eventually(is_made_anew)
    with pytest.raises(ChainBroken):
        await exported(door, capsys, tmp_path)


async def test_an_archived_log_goes_on_in_an_empty_one(
    nats_url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first record names the last one of the archive, so both are one chain."""
    with capture_logs():
        async with running_admin(nats_url) as client:
            await client.call("tenants.add", name="bar")
            kept = (await exported(door_of(client), capsys, tmp_path))["head"]
        async with connect(nats_url, "test") as broker:
            await broker.js.delete_stream(topology.AUDIT)
        async with running_admin(nats_url, audit_head=kept) as client:
            await client.call("tenants.add", name="more")
            door = door_of(client)
            assert (await exported(door, capsys, tmp_path))["exported"] == 2
            last = await head(door, capsys, directory=tmp_path)
            assert await head(door, capsys, head=[kept]) == last
            with pytest.raises(ChainBroken, match="the beginning of all"):
                await head(door, capsys)
        async with running_admin(nats_url, audit_head=kept) as client:  # it is empty no more
            await client.call("tenants.remove", name="more")
            assert await head(door_of(client), capsys, head=[kept, last]) != last


async def test_a_backup_has_it_with_the_same_chain(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Restored elsewhere, the head that was kept is there, and the chain goes on."""
    told = {"dir": tmp_path / "backup", "stream": [topology.AUDIT], "json": True}
    with capture_logs(), ExitStack() as stack:
        servers = [stack.enter_context(plain_server(tmp_path / name)) for name in ("one", "other")]
        async with running_admin(servers[0].url) as client:
            await client.call("tenants.add", name="bar")
            kept = await head(door_of(client), capsys)
        await backup(BackupSettings.model_validate({"nats": servers[0].url, **told}), STOP)
        await restore(RestoreSettings.model_validate({"nats": servers[1].url, **told}), STOP)
        async with running_admin(servers[1].url) as restored:
            assert await head(door_of(restored), capsys, head=[kept]) == kept
            await restored.call("tenants.add", name="more")
            assert await head(door_of(restored), capsys, head=[kept]) != kept


@contextmanager
def plain_server(store: Path) -> Iterator[NatsServer]:
    store.mkdir()
    server = NatsServer(store)
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize(
    "told",
    [{"head": ["x"]}, {"head": [f"1:{GENESIS}"]}, {"since": "soon"}, {"verify": 1, "who": "x"}],
)
def test_options_that_make_no_sense_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AuditSettings.model_validate(told)

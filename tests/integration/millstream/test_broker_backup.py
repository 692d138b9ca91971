"""`millstream broker backup` and `restore`: streams out of a broker without accounts, and back."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig

from millstream.broker.backup_commands import backup, restore
from millstream.broker.backup_manifest import BackupUnusable, read_manifest
from millstream.broker.backup_settings import BackupSettings, RestoreSettings
from millstream.broker.stream_snapshots import CHUNK_BYTES, SnapshotFailed, list_streams
from tests.support.accounts_server import connect
from tests.support.gateways import cell
from tests.support.nats_server import NatsServer
from tests.support.stored_streams import (
    KV,
    LEDGER,
    NAMES,
    USAGE,
    StreamFacts,
    fill_streams,
    read_facts,
    store_again,
)

STOP = asyncio.Event()


async def run_backup(url: str, folder: Path, **options: Any) -> None:
    await backup(BackupSettings.model_validate({"nats": url, "folder": folder, **options}), STOP)


async def run_restore(url: str, folder: Path, **options: Any) -> None:
    await restore(RestoreSettings.model_validate({"nats": url, "folder": folder, **options}), STOP)


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    """A broker without accounts: streams of others' making are backed up and restored as well."""
    (tmp_path / "nats").mkdir()
    server = NatsServer(tmp_path / "nats")
    yield server.url
    server.kill()


@pytest.fixture
def other_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A broker without streams."""
    (tmp_path / "other").mkdir()
    server = NatsServer(tmp_path / "other")
    yield server
    server.kill()


async def fill(url: str) -> StreamFacts:
    async with client_of(url) as client:
        await fill_streams(client)
        await client.jetstream().add_stream(
            StreamConfig("TOKENS_0", subjects=["infer.token.>"], storage=StorageType.MEMORY)
        )
        return await read_facts(dict.fromkeys(NAMES, client))


def redelivered(facts: StreamFacts) -> tuple[int, int, int]:
    """What a restored consumer has: its un-acked deliveries are to come again."""
    floor, pending, left = facts.consumer
    return floor, 0, left + pending


async def test_a_restored_broker_has_what_was_backed_up(
    nats_url: str, other_server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages, sequences, ack floors, revisions, counters; what is in memory is left out."""
    before = await fill(nats_url)
    folder = tmp_path / "backup"
    await run_backup(nats_url, folder, json=True)
    assert {path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())} == {0}
    told = json.loads(capsys.readouterr().out)
    assert [each["stream"] for each in told["streams"]] == sorted(NAMES)
    assert told["left_out"] == {"TOKENS_0": "in memory: empty after any full stop"}
    await run_restore(other_server.url, folder, json=True)
    told = json.loads(capsys.readouterr().out)
    assert {each["stream"]: each["messages"] for each in told["streams"]} == {
        LEDGER: 50,
        KV: 3,
        USAGE: 2,
    }
    async with client_of(other_server.url) as client:
        after = await read_facts(dict.fromkeys(NAMES, client))
        assert after.sequences == before.sequences
        assert after.revisions == before.revisions
        assert (after.first_payload, after.counter) == (before.first_payload, before.counter)
        assert after.consumer[0] == before.consumer[0]
        assert not (await store_again(client)).duplicate  # as docs/backup.md says


async def test_a_cell_goes_on_at_another_broker(
    nats_url: str, other_server: NatsServer, tmp_path: Path
) -> None:
    """Every stream and bucket of the topology, as services make them, and services behind it."""
    async with cell(nats_url) as (gateway,):
        assert (await gateway.complete()).status == 200
    async with connect(nats_url, "test") as broker:
        before = {each["config"]["name"]: each for each in await list_streams(broker)}
    await run_backup(nats_url, tmp_path / "backup")
    await run_restore(other_server.url, tmp_path / "backup")
    async with connect(other_server.url, "test") as broker:
        after = {each["config"]["name"]: each for each in await list_streams(broker)}
    on_disk = {name for name, each in before.items() if each["config"]["storage"] == "file"}
    assert on_disk == set(after)
    for name, each in after.items():
        assert each["state"]["last_seq"] == before[name]["state"]["last_seq"], name
        assert each["state"]["messages"] == before[name]["state"]["messages"], name
        del each["config"]["metadata"]["millstream.backup"]
        assert each["config"] == before[name]["config"], name
    async with cell(other_server.url) as (gateway,):
        assert (await gateway.complete()).status == 200
        async with client_of(other_server.url) as client:
            ledger = (await client.jetstream().stream_info(LEDGER)).state
            await run_restore(other_server.url, tmp_path / "backup")  # has nothing to do
            assert (await client.jetstream().stream_info(LEDGER)).state == ledger


async def test_lines_say_the_same_as_json(
    nats_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people."""
    await fill(nats_url)
    await run_backup(nats_url, tmp_path / "one", stream=(KV,))
    out = capsys.readouterr().out
    assert f"stream {KV}, messages 3, consumers 0" in out
    assert LEDGER not in out


async def test_nothing_is_written_over(
    nats_url: str, other_server: NatsServer, tmp_path: Path
) -> None:
    """Neither a backup, nor a folder of something else, nor a stream; and nothing in part."""
    await fill(nats_url)
    folder = tmp_path / "backup"
    await run_backup(nats_url, folder)
    with pytest.raises(BackupUnusable, match="is a backup already"):
        await run_backup(nats_url, folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("")
    with pytest.raises(BackupUnusable, match=r"other files in it \(thesis.txt\)"):
        await run_backup(nats_url, tmp_path / "mine")
    async with client_of(other_server.url) as client:
        await client.jetstream().add_stream(StreamConfig(USAGE, subjects=["else"]))
        with pytest.raises(SnapshotFailed, match=f"{USAGE}: exists already.*nothing was restored"):
            await run_restore(other_server.url, folder)
        names = [each.config.name for each in await client.jetstream().streams_info()]
        assert names == [USAGE]
    with pytest.raises(BackupUnusable, match="there is no stream NONE; there is KV_registry"):
        await run_restore(other_server.url, folder, stream=("NONE",))
    await run_restore(other_server.url, folder, stream=(KV, LEDGER))


async def test_a_backup_that_is_not_whole_is_refused_before_anything_is_sent(
    nats_url: str, other_server: NatsServer, tmp_path: Path
) -> None:
    """A file changed, cut short or gone; the manifest gone or damaged, as behind a kill."""
    await fill(nats_url)
    folder = tmp_path / "backup"
    await run_backup(nats_url, folder)
    file, manifest = folder / f"{USAGE}.snapshot", folder / "manifest.json"
    whole, listed = file.read_bytes(), manifest.read_bytes()
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    for content, said in ((changed, "sha256"), (whole[:-1], "sha256"), (None, "half a backup")):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        else:
            assert not file.exists()
        with pytest.raises(BackupUnusable, match=said):
            await run_restore(other_server.url, folder)
        file.write_bytes(whole)
    for text, said in ((b"{", "cannot be read"), (None, "not finished")):
        manifest.unlink()
        if text:
            manifest.write_bytes(text)
        with pytest.raises(BackupUnusable, match=said):
            await run_restore(other_server.url, folder)
        manifest.write_bytes(listed)
    async with client_of(other_server.url) as client:
        assert await client.jetstream().streams_info() == []
    await run_restore(other_server.url, folder)


async def test_a_backup_of_another_cell_needs_a_word(
    nats_url: str, other_server: NatsServer, tmp_path: Path
) -> None:
    """Prompts of one cell must not appear in another by a slip."""
    await fill(nats_url)
    folder = tmp_path / "backup"
    await run_backup(nats_url, folder)
    manifest = folder / "manifest.json"
    told = json.loads(manifest.read_text())
    streams = [{**each, "account": "AOTHER"} for each in told["streams"]]
    for change, value in (({"streams": streams}, "AOTHER"), ({"cluster": "harbour"}, "harbour")):
        manifest.write_text(json.dumps({**told, **change}))
        with pytest.raises(BackupUnusable, match=f"{value}.*--other-cell"):
            await run_restore(other_server.url, folder)
    await run_restore(other_server.url, folder, other_cell=True)


async def test_an_interrupted_restore_is_repeated(
    nats_url: str, other_server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed in the middle of a stream: what is there is kept, half a stream is made anew."""
    await fill(nats_url)
    async with client_of(nats_url) as client:  # more than the server takes in one gulp
        for _ in range(60):
            await client.jetstream().publish("infer.ledger.acme", os.urandom(CHUNK_BYTES))
        before = await read_facts(dict.fromkeys(NAMES, client))
    folder = tmp_path / "backup"
    await run_backup(nats_url, folder)
    killed = await asyncio.to_thread(_restore_and_kill, other_server.url, folder)
    assert killed == -signal.SIGKILL
    async with client_of(other_server.url) as client:
        half = (await client.jetstream().stream_info(LEDGER)).state
        assert half.messages < before.sequences[LEDGER][0]
        capsys.readouterr()
        await run_restore(other_server.url, folder, json=True)
        told = json.loads(capsys.readouterr().out)
        assert told["restored_before"] == [KV]
        after = await read_facts(dict.fromkeys(NAMES, client))
        assert after.sequences == before.sequences
    await run_restore(other_server.url, folder, json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["streams"], told["restored_before"]) == ([], sorted(NAMES))


KILLED_BEHIND_CHUNKS = """
import os, signal, sys
from millstream import cli
from millstream.broker import stream_snapshots
real, left = stream_snapshots._send, 30
async def send(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return await real(*args)
stream_snapshots._send = send
sys.exit(cli.main(sys.argv[1:]))
"""


def _restore_and_kill(url: str, folder: Path) -> int:
    words = ["broker", "restore", str(folder), "--nats", url]
    command = [sys.executable, "-c", KILLED_BEHIND_CHUNKS, *words]
    return subprocess.run(command, check=False, capture_output=True).returncode


async def test_a_backup_that_is_killed_is_no_backup_and_is_begun_anew(
    nats_url: str, tmp_path: Path
) -> None:
    """Its folder has no manifest; the next run needs no other one."""
    await fill(nats_url)
    folder = tmp_path / "backup"
    folder.mkdir()
    (folder / f"{LEDGER}.partial").write_bytes(b"half")
    (folder / f"{KV}.snapshot").write_bytes(b"old")
    with pytest.raises(BackupUnusable, match="not finished"):
        read_manifest(folder)
    await run_backup(nats_url, folder)
    assert {each.name for each in read_manifest(folder).streams} == {*NAMES}
    assert not list(folder.glob("*.partial"))


async def test_a_disk_without_room_is_said_before_anything_is_written(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both numbers."""
    await fill(nats_url)
    small = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small)
    with pytest.raises(BackupUnusable, match=r"the streams have \d+ bytes, and 1000 are free"):
        await run_backup(nats_url, tmp_path / "backup")
    assert list((tmp_path / "backup").iterdir()) == []


LIMITED = """
import resource, sys
from millstream import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("most_bytes", "said"), [(100, "KV_registry: cannot be written"), (400, "cannot be finished")]
)
async def test_a_write_that_fails_is_said_and_leaves_no_backup(
    nats_url: str, tmp_path: Path, most_bytes: int, said: str
) -> None:
    """That of a stream, and that of the manifest; here files may only have so many bytes."""
    await fill(nats_url)
    words = ["broker", "backup", str(tmp_path / "b"), "--stream", KV, "--nats", nats_url]
    command = [sys.executable, "-c", LIMITED, str(most_bytes), *words]
    failed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert failed.returncode == 1
    assert said in failed.stderr
    assert "File too large" in failed.stderr
    with pytest.raises(BackupUnusable, match="not finished"):
        read_manifest(tmp_path / "b")


async def test_a_full_broker_is_said_and_what_was_restored_stays(
    nats_url: str, tmp_path: Path
) -> None:
    """With more room the same command does the rest."""
    await fill(nats_url)
    folder, store = tmp_path / "backup", tmp_path / "small"
    await run_backup(nats_url, folder)
    store.mkdir()
    configuration = tmp_path / "nats.conf"

    def start(limit: str) -> NatsServer:
        configuration.write_text(
            f'jetstream {{ store_dir: "{store}", max_memory_store: 1MB, max_file_store: {limit} }}'
        )
        return NatsServer(store, configuration=configuration)

    server = start("64KB")
    try:
        with pytest.raises(SnapshotFailed, match=f"{LEDGER}: not restored: .*resources"):
            await run_restore(server.url, folder)
        server.kill()
        server = start("64MB")
        await run_restore(server.url, folder)
        async with client_of(server.url) as client:
            assert (await client.jetstream().stream_info(LEDGER)).state.messages == 50
    finally:
        server.kill()

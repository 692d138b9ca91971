"""The commands `millstream broker backup`, `restore` and `move`."""

import asyncio
import json
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from millstream.admin.console_output import make_console
from millstream.broker import backup_manifest, store_move, stream_restore
from millstream.broker.backup_manifest import BackupManifest, BackupUnusable, StreamBackup
from millstream.broker.backup_settings import BackupSettings, MoveSettings, RestoreSettings
from millstream.broker.stream_owners import assign_owners, parse_owners
from millstream.broker.stream_restore import BrokerIdentity
from millstream.broker.stream_snapshots import AddProgress, back_up_stream, list_streams
from millstream.up.data_directory import LOCK_FILE, DataDirectoryInUse
from millstream.up.file_lock import try_lock
from streams.broker.broker_client import connect

_IN_MEMORY = "in memory: empty after any full stop"
T = TypeVar("T")


async def backup(settings: BackupSettings, stop: asyncio.Event) -> None:
    """Write the streams of this connection's account to a folder, with consumers and checksums.

    Each stream is as it was at one time, but not all at the same: stop what publishes first.
    Streams in memory are left out. Raises `BackupUnusable` for a folder that cannot be written, as
    on a disk without room, and `SnapshotFailed` at the first stream that fails; what is written
    until then is no backup, and the next run overwrites it.
    """
    folder = settings.folder.expanduser()
    backup_manifest.check_free_folder(folder)
    async with connect(settings.nats, "millstream-backup", settings.nats_files) as broker:
        identity = await stream_restore.identify_broker(broker)
        found = {each["config"]["name"]: each for each in await list_streams(broker)}
        chosen = _choose(found, settings.stream, folder)
        stored = [n for n, each in chosen.items() if each["config"]["storage"] == "file"]
        size = sum(int(chosen[name]["state"]["bytes"]) for name in stored)
        _check_room(folder, size)
        with _show_progress("Backing up", size) as add_progress:
            streams = [await back_up_stream(broker, name, folder, add_progress) for name in stored]
    left_out = dict.fromkeys(sorted(chosen.keys() - set(stored)), _IN_MEMORY)
    manifest = _make_manifest(identity, streams, left_out)
    backup_manifest.write_manifest(folder, manifest)
    _report(settings.as_json, _describe_backup(folder, manifest))


async def restore(settings: RestoreSettings, stop: asyncio.Event) -> None:
    """Make the streams of a backup in a broker that lacks them, with their consumers.

    Everything is checked before anything is sent: the files, the origin, and that no stream of
    another's exists. Raises `BackupUnusable`, or `SnapshotFailed`; then it can be run again, and
    does the rest.
    """
    folder = settings.folder.expanduser()
    manifest = backup_manifest.read_manifest(folder)
    chosen = _choose({each.name: each for each in manifest.streams}, settings.stream, folder)
    async with connect(settings.nats, "millstream-restore", settings.nats_files) as broker:
        identity = await stream_restore.identify_broker(broker)
        stream_restore.check_origin(folder, manifest, identity, settings.other_cell)
        streams = list(_of_account(chosen, settings.accounts, identity.account))
        await stream_restore.verify_files(folder, streams)
        plan = await stream_restore.plan_restore(broker, manifest, streams)
        with _show_progress("Restoring", plan.bytes) as add_progress:
            await stream_restore.run_plan(broker, manifest, plan, folder, add_progress)
    restored = [_describe_stream(each) for each in plan.to_restore]
    facts = {"folder": str(folder), "account": identity.account, "streams": restored}
    _report(settings.as_json, {**facts, "restored_before": list(plan.done)})


async def move(settings: MoveSettings, stop: asyncio.Event) -> None:
    """Move a stopped server's streams from `$G` to the folders of the accounts that own them.

    Raises `DataDirectoryInUse` or `MoveRefused`, with nothing changed. A run that was killed can be
    repeated: each stream is in one place or the other.
    """
    base = settings.folder.expanduser().resolve()
    owners = parse_owners(await asyncio.to_thread(settings.accounts.read_text))
    store = store_move.find_store(base)
    with _locked(base):
        store_move.check_stopped(store)
        moves = store_move.plan_move(store, owners)
        if not settings.dry_run:
            store_move.apply_moves(store, moves)
    rows = [{"stream": each.name, "to": str(each.target)} for each in moves]
    _report(settings.as_json, {"moved": not settings.dry_run, "streams": rows})


def _choose(found: Mapping[str, T], wanted: Iterable[str], folder: Path) -> dict[str, T]:
    """The streams that `--stream` names, or all; raises for one that is not there."""
    names = list(wanted) or list(found)
    if missing := [name for name in names if name not in found]:
        known = ", ".join(found) or "none"
        raise BackupUnusable(folder, f"there is no stream {', '.join(missing)}; there is {known}")
    return {name: found[name] for name in names}


def _of_account(
    streams: Mapping[str, StreamBackup], table: Path | None, account: str
) -> Iterator[StreamBackup]:
    """The streams that `account` owns by the table; all of them without a table."""
    owners = assign_owners(streams, parse_owners(table.read_text())) if table else {}
    return (each for name, each in streams.items() if owners.get(name, account) == account)


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise BackupUnusable(
            folder, f"the streams have {size} bytes, and {free} are free on that disk"
        )


def _make_manifest(
    identity: BrokerIdentity, streams: list[StreamBackup], left_out: dict[str, str]
) -> BackupManifest:
    return BackupManifest(
        id=secrets.token_hex(16),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        account=identity.account,
        cluster=identity.cluster,
        server_version=identity.server_version,
        streams=tuple(streams),
        left_out=left_out,
    )


def _describe_backup(folder: Path, manifest: BackupManifest) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "account": manifest.account,
        "streams": [_describe_stream(each) for each in manifest.streams],
        "left_out": manifest.left_out,
    }


def _describe_stream(stream: StreamBackup) -> dict[str, Any]:
    messages, consumers = (stream.state.get(key, 0) for key in ("messages", "consumer_count"))
    return {
        "stream": stream.name,
        "messages": messages,
        "consumers": consumers,
        "bytes": stream.bytes,
    }


def _report(as_json: bool, facts: dict[str, Any]) -> None:
    """Print one JSON object, or a line for each fact and stream."""
    if as_json:
        print(json.dumps(facts))
        return
    console = make_console()
    for name, value in facts.items():
        if isinstance(value, list):
            for row in value:
                console.print(_as_line(row))
            console.print(f"{name}: {len(value)}")
        else:
            console.print(f"{name}: {_as_line(value)}")


def _as_line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    return str(value)


@contextmanager
def _show_progress(what: str, size: int) -> Iterator[AddProgress]:
    """A bar on stderr while it is a terminal; yields what counts bytes of the snapshots."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield partial(bar.advance, bar.add_task(what, total=size or None))


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Hold the lock of a data directory that has one; raises `DataDirectoryInUse`."""
    if not (base / LOCK_FILE).exists():
        yield
        return
    with (base / LOCK_FILE).open("r+") as lock:
        if not try_lock(lock):
            raise DataDirectoryInUse(base)
        yield

"""The commands `millstream broker backup`, `restore` and `move`."""

import asyncio
import json
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from millstream.broker.store_connections import Store, open_stores
from millstream.broker.stream_owners import parse_owners
from millstream.broker.stream_snapshots import (
    AddProgress,
    SnapshotFailed,
    back_up_stream,
    list_streams,
)
from millstream.up.data_directory import LOCK_FILE, DataDirectoryInUse
from millstream.up.file_lock import try_lock
from streams.accounts.access import store_of

_IN_MEMORY = "in memory: empty after any full stop"
T = TypeVar("T")


async def backup(settings: BackupSettings, stop: asyncio.Event) -> None:
    """Write the streams of both stores to a folder, with consumers and checksums.

    Without a cell's keys they are those of this connection's account. Each stream is as it was at
    one time, but not all at the same: stop what publishes first. Streams in memory are left out.

    Raises `BackupUnusable` for a folder that cannot be written, as
    on a disk without room, and `SnapshotFailed` at the first stream that fails; what is written
    until then is no backup, and the next run overwrites it.
    """
    folder = settings.folder.expanduser()
    backup_manifest.check_free_folder(folder)
    async with open_stores(settings, "millstream-backup") as stores:
        chosen = _choose(await _list_all(stores), settings.stream, folder)
        stored = [each for each in chosen.values() if each.is_stored]
        size = sum(each.bytes for each in stored)
        _check_room(folder, size)
        with _show_progress("Backing up", size) as add_progress:
            streams = [
                await back_up_stream(each.store, each.name, folder, add_progress) for each in stored
            ]
    left_out = {each.name: _IN_MEMORY for each in chosen.values() if not each.is_stored}
    manifest = _make_manifest(stores[0], streams, left_out)
    backup_manifest.write_manifest(folder, manifest)
    facts = {"folder": str(folder), "streams": [_describe_stream(each) for each in streams]}
    _report(settings.as_json, {**facts, "left_out": left_out})


@dataclass(frozen=True)
class _FoundStream:
    """A stream as its server describes it, and the store that has it."""

    store: Store
    name: str
    bytes: int
    is_stored: bool  # in files


async def _list_all(stores: Sequence[Store]) -> dict[str, _FoundStream]:
    """All streams of all stores, by name."""
    found: dict[str, _FoundStream] = {}
    for store in stores:
        for each in await list_streams(store.broker):
            name, is_stored = each["config"]["name"], each["config"]["storage"] == "file"
            if name in found:
                raise SnapshotFailed(
                    name,
                    "is in both stores, and a backup has one stream of a name: remove the one "
                    f"that is not in {store_of(name)}",
                )
            found[name] = _FoundStream(store, name, int(each["state"]["bytes"]), is_stored)
    return dict(sorted(found.items()))


async def restore(settings: RestoreSettings, stop: asyncio.Event) -> None:
    """Make the streams of a backup in a broker that lacks them, with their consumers.

    With a cell's keys each goes to the store that it belongs to. Everything is checked before
    anything is sent: the files, the origin, and that no stream of another's exists. Raises
    `BackupUnusable`, or `SnapshotFailed`; then it can be run again, and does the rest.
    """
    folder = settings.folder.expanduser()
    manifest = backup_manifest.read_manifest(folder)
    chosen = _choose({each.name: each for each in manifest.streams}, settings.stream, folder)
    async with open_stores(settings, "millstream-restore") as stores:
        stream_restore.check_origin(folder, manifest, chosen.values(), stores, settings.other_cell)
        await stream_restore.verify_files(folder, chosen.values())
        plans = [
            await stream_restore.plan_restore(store, manifest, list(chosen.values()))
            for store in stores
        ]
        with _show_progress("Restoring", sum(plan.bytes for plan in plans)) as add_progress:
            for plan in plans:
                await stream_restore.run_plan(manifest, plan, folder, add_progress)
    rows = [
        {**_describe_stream(each), "account": plan.store.account}
        for plan in plans
        for each in plan.to_restore
    ]
    done = sorted(name for plan in plans for name in plan.done)
    _report(settings.as_json, {"folder": str(folder), "streams": rows, "restored_before": done})


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


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise BackupUnusable(
            folder,
            f"the streams have {size} bytes, and {free} are free on that disk: name a folder on "
            "another one",
        )


def _make_manifest(
    store: Store, streams: list[StreamBackup], left_out: dict[str, str]
) -> BackupManifest:
    return BackupManifest(
        id=secrets.token_hex(16),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        cluster=store.cluster,
        server_version=store.server_version,
        streams=tuple(streams),
        left_out=left_out,
    )


def _describe_stream(stream: StreamBackup) -> dict[str, Any]:
    messages, consumers = (stream.state.get(key, 0) for key in ("messages", "consumer_count"))
    return {
        "stream": stream.name,
        "messages": messages,
        "consumers": consumers,
        "bytes": stream.bytes,
        "account": stream.account,
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

"""A whole backup into a broker: nothing is overwritten, and an interrupted restore goes on.

Each restored stream carries the backup's id in its metadata, with the word `partial` until its last
byte has arrived. So a second run tells what it has restored already, what to begin anew, and
another's streams, which it never touches.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.broker.backup_manifest import (
    BackupManifest,
    BackupUnusable,
    StreamBackup,
    verify_snapshot,
)
from millstream.broker.store_connections import WITHOUT_ACCOUNTS, Store
from millstream.broker.stream_snapshots import (
    AddProgress,
    SnapshotFailed,
    call_api,
    list_streams,
    restore_stream,
    with_metadata,
)
from streams.broker.broker_client import Broker

_MARK = "millstream.backup"
_PARTIAL, _DONE = "partial", "done"


@dataclass(frozen=True)
class RestorePlan:
    """Plan of a restore into one store: streams to make, partial ones to remove first, and done."""

    store: Store
    to_restore: tuple[StreamBackup, ...]
    to_remove: tuple[str, ...]
    done: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """The size of the files to be sent."""
        return sum(stream.bytes for stream in self.to_restore)


def check_origin(
    folder: Path,
    manifest: BackupManifest,
    streams: Iterable[StreamBackup],
    stores: Sequence[Store],
    is_allowed: bool,
) -> None:
    """Raise `BackupUnusable` for a backup of another cell, unless the operator `is_allowed` it.

    Cells are told apart by accounts and cluster name. What was made without accounts may go into
    accounts: that is how a cell gets some.
    """
    here = {store.account for store in stores}
    foreign = {stream.account for stream in streams} - {WITHOUT_ACCOUNTS, *here}
    cluster = stores[0].cluster
    if is_allowed or not (foreign or manifest.cluster != cluster):
        return
    accounts = ", ".join(sorted(foreign)) or "the same accounts"
    raise BackupUnusable(
        folder,
        f"is of {accounts} in cluster {manifest.cluster or 'without a name'}, and this is "
        f"{', '.join(sorted(here))} in cluster {cluster or 'without a name'}; if it shall go "
        "there: --other-cell",
    )


async def plan_restore(
    store: Store, manifest: BackupManifest, streams: Iterable[StreamBackup]
) -> RestorePlan:
    """Compare those streams of a backup that belong to a store with what it has.

    Nothing is changed. Raises `SnapshotFailed` with the names of streams that exist and are not of
    this backup.
    """
    existing = {each["config"]["name"]: each["config"] for each in await list_streams(store.broker)}
    marks = {name: (config.get("metadata") or {}).get(_MARK) for name, config in existing.items()}
    to_restore, to_remove, done, others = [], [], [], []
    for stream in (each for each in streams if store.owns(each.name)):
        if stream.name not in existing:
            to_restore.append(stream)
        elif marks[stream.name] == _mark(manifest, _PARTIAL):
            to_restore.append(stream)
            to_remove.append(stream.name)
        elif marks[stream.name] == _mark(manifest, _DONE):
            done.append(stream.name)
        else:
            others.append(stream.name)
    if others:
        raise SnapshotFailed(
            ", ".join(others),
            "exists already and is not overwritten; nothing was restored. Stop all services (the "
            "admin service makes missing streams at once), start the servers on empty store "
            "directories, and run this again; or name other streams with --stream",
        )
    return RestorePlan(store, tuple(to_restore), tuple(to_remove), tuple(done))


async def verify_files(folder: Path, streams: Iterable[StreamBackup]) -> None:
    """Check every stream's file before anything is sent; raises `BackupUnusable`."""
    for stream in streams:
        await asyncio.to_thread(verify_snapshot, folder, stream)


async def run_plan(
    manifest: BackupManifest, plan: RestorePlan, folder: Path, add_progress: AddProgress
) -> None:
    """Remove what an interrupted run has left, and restore the streams one after the other.

    Raises `SnapshotFailed` at the first that fails; those before it stay. Can be repeated.
    """
    broker = plan.store.broker
    for name in plan.to_remove:
        await _expect_done(broker, f"STREAM.DELETE.{name}", None, name)
    partial, done = ({_MARK: _mark(manifest, word)} for word in (_PARTIAL, _DONE))
    for stream in plan.to_restore:
        config = await restore_stream(broker, stream, partial, folder, add_progress)
        finished = with_metadata(config, done)
        await _expect_done(broker, f"STREAM.UPDATE.{stream.name}", finished, stream.name)


async def _expect_done(broker: Broker, subject: str, body: Any, stream: str) -> None:
    answer = await call_api(broker, subject, body)
    if "error" in answer:
        raise SnapshotFailed(stream, str(answer["error"]["description"]))


def _mark(manifest: BackupManifest, word: str) -> str:
    return f"{manifest.id} {word}"

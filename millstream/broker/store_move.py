"""Moves the streams of one stopped nats-server from `$G` to the folders of their accounts.

A server that is started with accounts reads `jetstream/<account>/streams` alone: what was stored
without accounts lies in `jetstream/$G/streams`, unseen. Each stream is moved by one rename, so
that it is in one place or the other whenever the move is killed; a second run moves the rest.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream.broker.backup_manifest import sync_folder
from millstream.broker.store_connections import WITHOUT_ACCOUNTS
from millstream.broker.stream_owners import assign_owners
from streams.errors import MillstreamError

_STORES = ("nats/jetstream", "jetstream")  # of `millstream up`, of a nats-server's own store_dir
_USE_BACKUP = "use `millstream broker backup` before accounts and `broker restore` with them"


class MoveRefused(MillstreamError):
    """The streams of a store cannot be moved; nothing was changed."""


@dataclass(frozen=True)
class StreamMove:
    """One stream's folder, where it lies and where it is to lie."""

    name: str
    source: Path
    target: Path


def find_store(data_dir: Path) -> Path:
    """Return the folder `jetstream` of a data directory or store; raises `MoveRefused`."""
    base = data_dir.expanduser().resolve()
    for name in _STORES:
        if (base / name).is_dir():
            return base / name
    raise MoveRefused(f"{base} has no {' and no '.join(_STORES)}: it is no store of a nats-server")


def check_stopped(store: Path) -> None:
    """Raise `MoveRefused` if a process has files of the store open, or its nats-server runs.

    Seen are processes that this user may look at, and that call the store by the same path: not
    those of other users, nor of a container with a mount of its own.
    """
    if pid := next(_find_users(store), None):
        raise MoveRefused(f"process {pid} uses {store}: stop the nats-server first")


def plan_move(store: Path, owners: Mapping[str, str]) -> list[StreamMove]:
    """Return what is to be moved, by name; empty if nothing is stored without accounts.

    `owners` has the account's public key by stream name or pattern. Raises `OwnersUnusable` for a
    stream that has none, and `MoveRefused` for a store of a cluster, an encrypted one, and streams
    that exist in both places.
    """
    _check_single_server(store)
    source = store / WITHOUT_ACCOUNTS / "streams"
    names = [path.name for path in source.iterdir() if path.is_dir()] if source.is_dir() else []
    moves = [
        StreamMove(name, source / name, store / account / "streams" / name)
        for name, account in assign_owners(names, owners).items()
    ]
    for move in moves:
        if (move.source / "meta.key").exists():
            raise MoveRefused(f"{move.name} is encrypted with keys of its account: {_USE_BACKUP}")
        if move.target.exists():
            raise MoveRefused(
                f"{move.name} is in both {move.source} and {move.target}: the server has been "
                "started with accounts. Stop it, see which of the two is right, remove the other"
            )
    return moves


def apply_moves(store: Path, moves: list[StreamMove]) -> None:
    """Move the folders, durably and one after the other; remove the empty `$G` at the end."""
    for move in moves:
        move.target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(move.source, move.target)
        sync_folder(move.target.parent)
        sync_folder(move.source.parent)
    for folder in (store / WITHOUT_ACCOUNTS / "streams", store / WITHOUT_ACCOUNTS):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    sync_folder(store)


def _check_single_server(store: Path) -> None:
    """Each node of a cluster has Raft groups; with other folders than they name, data is lost."""
    groups = sorted(path.relative_to(store) for path in store.glob("*/_js_"))
    if groups:
        raise MoveRefused(
            f"{store / groups[0]} says that this store is of a cluster, whose servers would delete "
            f"moved streams as orphans: {_USE_BACKUP}"
        )


def _find_users(store: Path) -> Iterator[int]:
    """Process ids of whoever has a file of the store open, or is a nats-server that names it.

    An idle nats-server has none open: its words, its environment and its configuration say where
    its store is.
    """
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(each) for each in (process / "fd").iterdir()]
            is_named = str(store.parent).encode() in _describe_nats_server(process)
        except OSError:  # it has ended, or is another user's
            continue
        if is_named or any(Path(link).is_relative_to(store) for link in links):
            yield int(process.name)


def _describe_nats_server(process: Path) -> bytes:
    """Command line, environment and configuration of a nats-server; empty for other programs."""
    words = (process / "cmdline").read_bytes().split(b"\0")
    if os.path.basename(words[0]) != b"nats-server":
        return b""
    files = [process / "cwd" / os.fsdecode(word) for word in words[1:] if word]
    texts = [file.read_bytes() for file in files if file.is_file()]
    return b"\n".join([*words, (process / "environ").read_bytes(), *texts])

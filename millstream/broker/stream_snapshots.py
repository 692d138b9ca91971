"""One stream to a file and back, by JetStream's API (ADR-7: `STREAM.SNAPSHOT`, `STREAM.RESTORE`).

A snapshot comes in chunks. Each is answered once it is in the file, and the server keeps few of
them unanswered, so that no stream is ever whole in memory, here or there.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import orjson
from nats.aio.msg import Msg

from millstream.broker.backup_manifest import (
    PARTIAL_SUFFIX,
    SNAPSHOT_SUFFIX,
    StreamBackup,
    open_owner_only,
)
from millstream.broker.store_connections import Store
from streams.broker.broker_client import Broker
from streams.broker.countdown import Countdown
from streams.errors import BrokerUnavailable, MillstreamError

CHUNK_BYTES = 128 * 2**10  # well below every max_payload
PLACEMENT_SECONDS = 30.0
_RETRY_SECONDS = 0.5
_NOT_YET = frozenset({10005, 10008})  # too few servers known for the replicas; no leader
ANSWER_SECONDS = 60.0  # the server syncs files, and a cluster elects a leader, meanwhile
_WHOLE = ("", "204")  # statuses of the empty message behind the last chunk: none after one chunk
AddProgress = Callable[[int], None]


class SnapshotFailed(MillstreamError):
    """A stream was not backed up or not restored; `stream` is its name."""

    def __init__(self, stream: str, reason: str) -> None:
        super().__init__(f"{stream}: {reason}")
        self.stream = stream


async def call_api(broker: Broker, subject: str, body: object = None) -> dict[str, Any]:
    """Return the answer of JetStream's API, `{"error": …}` included.

    Raises `BrokerUnavailable` if none comes within 60 s.
    """
    payload = b"" if body is None else orjson.dumps(body)
    answer = await broker.request(f"$JS.API.{subject}", payload, ANSWER_SECONDS)
    if answer is None:
        raise BrokerUnavailable(f"no answer to $JS.API.{subject} within {ANSWER_SECONDS:g} s")
    parsed: dict[str, Any] = orjson.loads(answer)
    return parsed


async def list_streams(broker: Broker) -> list[dict[str, Any]]:
    """Return the configuration and state of every stream of a connection's account, by name.

    It must be a connection within the account that has them: an import asks one store alone.
    """
    found: dict[str, dict[str, Any]] = {}
    while True:
        page = await call_api(broker, "STREAM.LIST", {"offset": len(found)})
        if missing := page.get("missing"):
            raise SnapshotFailed(", ".join(missing), "its leader does not answer; try again")
        streams = page.get("streams") or []
        found.update({each["config"]["name"]: each for each in streams})
        if not streams or len(found) >= page.get("total", 0):
            return [found[name] for name in sorted(found)]


async def back_up_stream(
    store: Store, name: str, folder: Path, add_progress: AddProgress
) -> StreamBackup:
    """Write a stream with its consumers to a file in `folder`, and return what was written.

    `add_progress` is called with the bytes of each chunk. Raises `SnapshotFailed` if the server
    refuses or stops half-way, or if the file cannot be written, as on a full disk; what is left
    then has the suffix `.partial`.
    """
    partial, broker = folder / f"{name}{PARTIAL_SUFFIX}", store.broker
    async with _listen(broker) as (inbox, chunks):
        query = {
            "deliver_subject": inbox,
            "no_consumers": False,
            "chunk_size": CHUNK_BYTES,
            "jsck": True,  # the server checks its own checksums first
        }
        told = await call_api(broker, f"STREAM.SNAPSHOT.{name}", query)
        if "error" in told:
            raise SnapshotFailed(name, f"no snapshot: {told['error']['description']}")
        try:
            size, sha256 = await _write_chunks(broker, chunks, partial, name, add_progress)
        except OSError as error:
            raise SnapshotFailed(
                name,
                f"cannot be written: {partial}: {error.strerror}; this is no backup: make room, or "
                "name a folder on another disk, and run the command again",
            ) from None
    file = f"{name}{SNAPSHOT_SUFFIX}"
    partial.replace(folder / file)
    return StreamBackup(
        name=name,
        account=store.account,
        file=file,
        bytes=size,
        sha256=sha256,
        config=told["config"],
        state=told["state"],
    )


async def _write_chunks(
    broker: Broker,
    chunks: "asyncio.Queue[Msg]",
    path: Path,
    name: str,
    add_progress: AddProgress,
) -> tuple[int, str]:
    """Write all chunks to a file, each answered once it is there; return bytes and sha256."""
    size, digest = 0, hashlib.sha256()
    with os.fdopen(open_owner_only(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as out:
        while (chunk := await _next_chunk(chunks, name)).data:
            out.write(chunk.data)
            digest.update(chunk.data)
            size += len(chunk.data)
            if chunk.reply:
                await broker.publish(chunk.reply)
            add_progress(len(chunk.data))
        _check_whole(chunk, name)
        out.flush()
        await asyncio.to_thread(os.fsync, out.fileno())
    return size, digest.hexdigest()


@asynccontextmanager
async def _listen(broker: Broker) -> AsyncIterator[tuple[str, asyncio.Queue[Msg]]]:
    """An inbox and what arrives there; the server's flow control bounds the queue."""
    inbox, chunks = broker.client.new_inbox(), asyncio.Queue[Msg]()
    # A renewed one would for a moment get each chunk twice
    subscription = await broker.subscribe(inbox, chunks.put, renewed=False)
    try:
        yield inbox, chunks
    finally:
        await subscription.unsubscribe()


async def _next_chunk(chunks: "asyncio.Queue[Msg]", name: str) -> Msg:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await chunks.get()
    except TimeoutError:
        raise SnapshotFailed(
            name, f"no chunk for {ANSWER_SECONDS:g} s; is the server still there? Begin again"
        ) from None


def _check_whole(end: Msg, name: str) -> None:
    status = (end.headers or {}).get("Status", "")
    if status not in _WHOLE:
        reason = (end.headers or {}).get("Description", "no reason given")
        raise SnapshotFailed(name, f"the server ended the snapshot early: {status} {reason}")


async def restore_stream(
    broker: Broker,
    stream: StreamBackup,
    metadata: dict[str, str],
    folder: Path,
    add_progress: AddProgress,
) -> dict[str, Any]:
    """Make a stream of its file in `folder`, and return its configuration as the server has it now.

    `metadata` is added to the configuration before the first byte is sent: whoever finds a stream
    whose restore was interrupted, which keeps what has arrived, knows it by that. Raises
    `SnapshotFailed` if the server refuses, as for a stream that exists or a full disk.
    """
    begun = await _begin(broker, stream, with_metadata(stream.config, metadata))
    with (folder / Path(stream.file).name).open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            _check_accepted(await _send(broker, stream, begun, chunk), stream)
            add_progress(len(chunk))
    made = _check_accepted(await _send(broker, stream, begun, b""), stream)
    last = int(made.get("state", {}).get("last_seq", -1))
    if last != stream.last_sequence:
        raise SnapshotFailed(
            stream.name, f"it was restored up to message {last}, not {stream.last_sequence}"
        )
    restored: dict[str, Any] = made["config"]
    return restored


async def _begin(broker: Broker, stream: StreamBackup, config: dict[str, Any]) -> dict[str, Any]:
    """Begin a restore; a cluster that has just started places no stream for some seconds."""
    query = {"config": config, "state": stream.state}
    with closing(Countdown(PLACEMENT_SECONDS)) as limit:
        while True:
            begun = await call_api(broker, f"STREAM.RESTORE.{stream.name}", query)
            error = begun.get("error")
            if error is None:
                return begun
            if error.get("err_code") not in _NOT_YET or not limit.seconds_left:
                raise _not_restored(stream, error["description"])
            await asyncio.sleep(_RETRY_SECONDS)


async def _send(broker: Broker, stream: StreamBackup, begun: dict[str, Any], chunk: bytes) -> bytes:
    answer = await broker.request(begun["deliver_subject"], chunk, ANSWER_SECONDS)
    if answer is None:
        raise SnapshotFailed(
            stream.name, "the server takes no more chunks: is its disk full, or is it gone?"
        )
    return answer


def _check_accepted(answer: bytes, stream: StreamBackup) -> dict[str, Any]:
    """Return the server's answer, empty behind most chunks; raises for an error in it."""
    parsed: dict[str, Any] = orjson.loads(answer) if answer.startswith(b"{") else {}
    if "error" in parsed:
        raise _not_restored(stream, parsed["error"]["description"])
    if answer.startswith(b"-ERR"):
        raise _not_restored(stream, answer.decode(errors="replace"))
    return parsed


def _not_restored(stream: StreamBackup, reason: str) -> SnapshotFailed:
    return SnapshotFailed(
        stream.name,
        f"not restored: {reason}; streams before it are whole: mend this (a full store: more room, "
        "or a larger max_file_store), and run the command again, which does the rest",
    )


def with_metadata(config: dict[str, Any], metadata: dict[str, str]) -> dict[str, Any]:
    """Return a stream's configuration with these entries in its metadata."""
    return {**config, "metadata": {**(config.get("metadata") or {}), **metadata}}

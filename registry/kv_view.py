"""KV view: a NATS KV bucket as an in-memory mapping, kept current and looked up without waiting.

nats-py's own watcher is not used: it can report its first read as complete before the values have
come (the consumer's information overtakes them), and a repair that fails is never tried again.
Instead the bucket republishes each message that it stores; the view reads the whole bucket when it
opens, after each reconnect and every `RESYNC_SECONDS`, and applies republished messages by
revision.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, Self, TypeVar

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, RePublish, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from streams.broker import declaration
from streams.broker.broker_client import (
    STORE_SECONDS,
    Broker,
    BrokerSubscription,
    StoreRefused,
    StreamMissing,
)
from streams.errors import BrokerMisconfigured, BrokerUnavailable, PayloadTooLarge
from streams.headers import EXPECTED_LAST
from streams.subjects import PREFIX

T = TypeVar("T")
Decode = Callable[[str, bytes], T]
Change = Callable[[T | None], bytes | None]
Declares = Callable[[], bool]  # whether this process makes a bucket that is missing

RESYNC_SECONDS = 30.0
RETRY_SECONDS = 0.25
MISSING_SECONDS = 0.1  # between two looks for a bucket that is about to be declared
OPEN_SECONDS = 10.0
CANCEL_SECONDS = 0.05
MAX_BYTES = 256 * 2**20
HISTORY = 8  # values kept of each key, so that the last good one is found behind unreadable ones
REFUSED_RETRY_SECONDS = 5.0
_HEADER_BYTES = 4096  # of a message's limit, for its subject and headers
log = structlog.get_logger()


def never() -> bool:
    """Return False: this process declares no bucket."""
    return False


@dataclass(frozen=True)
class KvEntry:
    """One change of a key in a bucket: its new value or, if `value` is None, its deletion.

    `revision` is the change's sequence in the bucket's stream.
    """

    key: str
    revision: int
    value: bytes | None


@dataclass(frozen=True)
class RecordChange(Generic[T]):
    """A change that is about to be stored: a key's value before and after, None for no such key."""

    key: str
    before: T | None
    after: T | None


# Entered before a change is stored, and left with what became of it; may refuse it by raising
ChangeRecorder = Callable[[RecordChange[T]], AbstractAsyncContextManager[None]]


class KvView(Generic[T]):
    """In-memory copy of a NATS KV bucket: the decoded values by key, looked up without waiting.

    `open` starts a task that keeps them current; `close` ends it. A value that cannot be decoded
    (ValueError) is logged, and the key keeps its last good one, also for views that open later: one
    bad record, or one of a newer release, takes nothing away.

    A bucket that was lost, or made anew, leaves the values as they were. Only a view whose
    `declares()` returns True, that of the admin service that leads, makes a missing bucket and
    writes the values back into it, unless somebody has written or deleted their keys there.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        decode: Decode[T],
        declares: Declares = never,
        replicas: int = 1,
    ) -> None:
        self._broker, self._name, self._decode, self._replicas = broker, name, decode, replicas
        self._declares = declares
        self._values: dict[str, T] = {}
        self._stored: dict[str, bytes] = {}  # what the values were decoded from
        self._revisions: dict[str, int] = {}  # deleted keys included: the last sequence per subject
        self._unreadable: dict[str, int] = {}  # revision of each key's last unreadable value
        self._created: datetime | None = None  # when the bucket was made that the values are from
        self._refusal: BrokerMisconfigured | None = None  # why the bucket cannot be made
        self._came_while_reading: list[KvEntry] | None = None
        self._is_synced = self._is_missing = False
        self._stale = asyncio.Event()
        self._changed = asyncio.Event()
        self._observers: list[Callable[[], None]] = []
        self.recorder: ChangeRecorder[T] = lambda change: nullcontext()
        self._task: asyncio.Task[None] | None = None
        self._subscription: BrokerSubscription | None = None

    @property
    def values(self) -> Mapping[str, T]:
        """The current values by key.

        Look values up, but do not keep the mapping: a reload replaces it.
        """
        return self._values

    async def open(self, seconds: float = OPEN_SECONDS) -> Self:
        """Start following the bucket; return once its contents are loaded.

        Raises `BrokerUnavailable` if they are not after `seconds`, and `BrokerMisconfigured` if
        the broker refuses the bucket; the view is closed then.
        """
        self._broker.on_reconnect.append(self._stale.set)
        self._task = asyncio.create_task(self._keep_current(), name=f"view-{self._name}")
        try:
            await self.wait_until(lambda: self._is_synced or self._refusal is not None, seconds)
            if self._refusal:
                raise self._refusal
        except BrokerUnavailable:
            await self.close()
            if self._is_missing:
                raise BucketMissing(self._name, seconds) from None
            raise
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Stop following the bucket; the values stay as they are. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        self._broker.on_reconnect.remove(self._stale.set)
        while not task.done():  # `asyncio.wait_for` of Python 3.11 may swallow a cancellation
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_SECONDS)
        if self._subscription:
            await self._subscription.unsubscribe()

    async def wait_until(
        self, condition: Callable[[], bool], seconds: float = OPEN_SECONDS
    ) -> None:
        """Wait until `condition()` returns True; it is called at once and after each change.

        Raises `BrokerUnavailable` after `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            reason = f"bucket {self._name!r} is not in the awaited state after {seconds:g} s"
            raise BrokerUnavailable(reason) from None

    def check_bucket(self, stream: str) -> None:
        """Look soon whether the bucket is there, if `stream` is its stream."""
        if stream == f"KV_{self._name}":
            self._stale.set()

    def on_change(self, observer: Callable[[], None]) -> None:
        """Register `observer` to be called after each change of the values; returns at once.

        It is called without arguments on the event loop and must neither block nor raise.
        """
        self._observers.append(observer)

    async def write(self, key: str, change: Change[T]) -> None:
        """Change one value by compare-and-set; return when this view shows the outcome.

        `change` gets the current value (None: no such key) and returns the bytes to store, or None
        to delete the key. It is called again if another writer was faster. Nothing is written if
        the value would not change. Raises `PayloadTooLarge` for a value that NATS does not carry,
        `BrokerUnavailable` if the broker does not answer, or `StoreRefused`.
        """
        while not await self._try_write(key, change):
            pass

    async def _try_write(self, key: str, change: Change[T]) -> bool:
        """Write once; returns False after a lost race, once the winner's value is in the view."""
        current, known = self._values.get(key), self._revisions.get(key, 0)
        wanted = change(current)
        is_newest = self._unreadable.get(key, -1) < known
        after = None if wanted is None else self._decode(key, wanted)
        if is_newest and current == after:
            return True
        if len(wanted or b"") > (limit := self._broker.max_payload - _HEADER_BYTES):
            raise PayloadTooLarge(len(wanted or b""), limit)  # NATS would close the connection
        headers = {EXPECTED_LAST: str(known)}
        if wanted is None:
            headers["KV-Operation"] = "DEL"
        try:
            async with self.recorder(RecordChange(key, current, after)):
                stored = await self._broker.store_retrying(
                    self._subject(key), wanted or b"", headers, STORE_SECONDS
                )
        except StoreRefused as error:
            if not error.is_conflict:
                raise
            self._stale.set()
            await self.wait_until(lambda: self._revisions.get(key, 0) != known)
            return False
        await self.wait_until(lambda: self._revisions.get(key, 0) >= stored.seq)
        return True

    def _subject(self, key: str) -> str:
        return f"$KV.{self._name}.{key}"

    async def _keep_current(self) -> None:
        while True:
            try:
                await self._reload()
                async with asyncio.timeout(RESYNC_SECONDS):
                    await self._stale.wait()
            except TimeoutError:
                continue
            except BrokerMisconfigured as refusal:
                log.error("kv_view_refused", bucket=self._name, reason=str(refusal))
                self._refusal = refusal
                self._changed.set()
                await asyncio.sleep(REFUSED_RETRY_SECONDS)
            except StreamMissing:
                await asyncio.sleep(MISSING_SECONDS)
            except (NatsError, BrokerUnavailable, StoreRefused, OSError) as error:
                log.warning("kv_view_interrupted", bucket=self._name, error=repr(error))
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:  # a bug of ours or of an observer: a dead view would be worse
                log.exception("kv_view_failed", bucket=self._name)
                await asyncio.sleep(RETRY_SECONDS)

    async def _reload(self) -> None:
        """Replace all values by those in the bucket and those republished while it was read.

        A bucket that is another one than before adds to the values, and gets what it lacks back.
        """
        self._stale.clear()
        declares = self._declares()
        created = await (self._declare() if declares else self._find_bucket())
        if self._subscription is None:
            subject = _changes_subject(self._name)
            self._subscription = await self._broker.subscribe(subject, self._on_republished)
        self._came_while_reading = []
        found = await self._broker.read_subject(f"KV_{self._name}", self._subject(">"))
        entries = [self._to_entry(m.subject, m.seq, m.data, m.headers) for m in found]
        is_another = self._created not in (None, created)
        self._replace(entries + self._came_while_reading, keep=is_another)
        self._came_while_reading = None
        if is_another and declares:
            await self._restore()
        self._created, self._refusal = created, None

    async def _declare(self) -> datetime | None:
        return await declare_bucket(self._broker, self._name, self._replicas)

    async def _find_bucket(self) -> datetime | None:
        """Return when the bucket was created; raises `StreamMissing` if there is none."""
        try:
            info = await declaration.stream_info(self._broker, f"KV_{self._name}")
        except NotFoundError:
            if not self._is_missing:
                log.warning("bucket_missing", bucket=self._name)
            self._is_missing = True
            raise StreamMissing(f"there is no bucket {self._name!r}") from None
        self._is_missing = False
        return info.created

    def _replace(self, entries: list[KvEntry], *, keep: bool) -> None:
        before, self._revisions = self._revisions, {}
        if not keep:
            self._values, self._stored = {}, {}
        for entry in entries:
            self._apply(entry)
        if self._revisions != before or not self._is_synced:
            self._is_synced = True
            self._notify_observers()

    async def _restore(self) -> None:
        """Write the values back whose keys the bucket has never had; a faster writer's stay."""
        lost = self._stored.keys() - self._revisions.keys()
        for key in lost:
            try:
                await self._broker.store(
                    self._subject(key), self._stored[key], {EXPECTED_LAST: "0"}, repeats=True
                )
            except StoreRefused as refusal:
                if not refusal.is_conflict:
                    raise
        log.warning("bucket_restored", bucket=self._name, records=len(lost))

    async def _on_republished(self, msg: Msg) -> None:
        headers = msg.headers or {}
        subject, seq = headers["Nats-Subject"], int(headers["Nats-Sequence"])
        entry = self._to_entry(subject, seq, msg.data, headers)
        if self._came_while_reading is not None:
            self._came_while_reading.append(entry)
        if self._apply(entry):
            self._notify_observers()

    def _to_entry(self, subject: str, seq: int, data: bytes, headers: Mapping[str, str]) -> KvEntry:
        deleted = "KV-Operation" in headers or "Nats-Marker-Reason" in headers
        return KvEntry(subject[len(self._subject("")) :], seq, None if deleted else data)

    def _apply(self, entry: KvEntry) -> bool:
        """Apply an entry unless a newer one of its key is known; returns True if it was applied."""
        if entry.revision <= self._revisions.get(entry.key, 0):
            return False
        self._revisions[entry.key] = entry.revision
        if entry.value is None:
            self._values.pop(entry.key, None)
            self._stored.pop(entry.key, None)
        else:
            self._decode_value(entry.key, entry.revision, entry.value)
        return True

    def _decode_value(self, key: str, revision: int, value: bytes) -> None:
        """Take a value; one that cannot be decoded leaves the last good one, and is logged once."""
        try:
            self._values[key] = self._decode(key, value)
            self._stored[key] = value
        except ValueError as error:
            if self._unreadable.get(key, 0) < revision:
                self._unreadable[key] = revision
                log.error("record_unreadable", bucket=self._name, key=key, error=str(error))

    def _notify_observers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for observer in self._observers:
            observer()


async def declare_bucket(broker: Broker, name: str, replicas: int) -> datetime | None:
    """Create a KV bucket, or update one to republish its changes, keep history and take all values.

    Its number of replicas may grow, but never shrinks. Safe from several services at once. Returns
    when it was created. Raises `BrokerUnavailable` or `BrokerMisconfigured`.
    """
    republish = RePublish(src=f"$KV.{name}.>", dest=_changes_subject(name))
    config = _bucket_config(name, replicas, republish)
    assert config.name
    with declaration.explaining_refusals(config):
        try:
            info = await declaration.stream_info(broker, config.name)
        except NotFoundError:
            await declaration.create_stream(broker, config)
            info = await declaration.stream_info(broker, config.name)
        known = info.config
        wanted = known.evolve(
            republish=republish,
            allow_direct=True,
            num_replicas=max(replicas, known.num_replicas or 1),
            max_msgs_per_subject=max(HISTORY, known.max_msgs_per_subject),
            max_msgs=-1,
            max_msg_size=-1,
            max_age=0,
        )
        if wanted.as_dict() != known.as_dict():
            await broker.js.update_stream(wanted)
    return info.created


class BucketMissing(BrokerUnavailable):
    """A bucket does not exist, and nobody has declared it within `seconds`."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(
            f"there is no bucket {name!r} after {seconds:g} s: `millstream admin` declares it; "
            "start one"
        )
        self.name, self.seconds = name, seconds


def _changes_subject(name: str) -> str:
    return f"{PREFIX}.changed.{name}.>"


def _bucket_config(name: str, replicas: int, republish: RePublish) -> StreamConfig:
    """Configure a KV bucket as every NATS client does (ADR-8), with republishing."""
    return StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        max_msgs_per_subject=HISTORY,
        discard=DiscardPolicy.NEW,
        max_bytes=MAX_BYTES,
        num_replicas=replicas,
        storage=StorageType.FILE,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
        republish=republish,
    )

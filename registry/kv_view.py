"""KV view: a NATS KV bucket as an in-memory mapping, kept current and looked up without waiting.

nats-py's own watcher is not used: it can report its first read as complete before the values have
come (the consumer's information overtakes them), and a repair that fails is never tried again.
Instead the bucket republishes each message that it stores; the view reads the whole bucket when it
opens, after each reconnect and every `RESYNC_SECONDS`, and applies republished messages by
revision.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, RePublish, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from streams.broker import declaration
from streams.broker.connection import Broker, BrokerSubscription, StoreRefused
from streams.errors import BrokerUnavailable
from streams.subjects import PREFIX

T = TypeVar("T")
Decode = Callable[[str, bytes], T]
Change = Callable[[T | None], bytes | None]

RESYNC_SECONDS = 30.0
RETRY_SECONDS = 0.25
OPEN_SECONDS = 10.0
CANCEL_SECONDS = 0.05
MAX_BYTES = 256 * 2**20
log = structlog.get_logger()


@dataclass(frozen=True)
class KvEntry:
    """One change of a key in a bucket: its new value or, if `value` is None, its deletion.

    `revision` is the change's sequence in the bucket's stream.
    """

    key: str
    revision: int
    value: bytes | None


class KvView(Generic[T]):
    """In-memory copy of a NATS KV bucket: the decoded values by key, looked up without waiting.

    `open` starts a task that keeps the values current, and `close` ends it. While the broker is
    unreachable, the values stay as they are. A value that `decode` cannot read (ValueError) is left
    out and logged, so that one bad record, or one of a newer release, does not affect the others.
    """

    def __init__(self, broker: Broker, name: str, decode: Decode[T], replicas: int) -> None:
        self._broker, self._name, self._decode, self._replicas = broker, name, decode, replicas
        self._values: dict[str, T] = {}
        self._revisions: dict[str, int] = {}  # deleted keys included: the last sequence per subject
        self._came_while_reading: list[KvEntry] | None = None
        self._is_synced = False
        self._stale = asyncio.Event()
        self._changed = asyncio.Event()
        self._observers: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._subscription: BrokerSubscription | None = None

    @property
    def values(self) -> Mapping[str, T]:
        """The current values by key.

        Look values up, but do not keep the mapping: a reload replaces it.
        """
        return self._values

    async def open(self, seconds: float = OPEN_SECONDS) -> Self:
        """Start following the bucket, creating it if missing; return once its contents are loaded.

        Raises `BrokerUnavailable` if they are not loaded after `seconds`, and closes the view then.
        """
        self._broker.on_reconnect.append(self._stale.set)
        self._task = asyncio.create_task(self._keep_current(), name=f"view-{self._name}")
        try:
            await self.wait_until(lambda: self._is_synced, seconds)
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

    def on_change(self, observer: Callable[[], None]) -> None:
        """Register `observer` to be called after each change of the values; returns at once.

        It is called without arguments on the event loop and must neither block nor raise.
        """
        self._observers.append(observer)

    async def write(self, key: str, change: Change[T]) -> None:
        """Change one value by compare-and-set; return when this view shows the outcome.

        `change` gets the current value (None: no such key) and returns the bytes to store, or None
        to delete the key. It is called again if another writer was faster. Nothing is written if
        the value would not change. Raises `BrokerUnavailable` if the broker does not answer, or
        `StoreRefused`.
        """
        while not await self._try_write(key, change):
            pass

    async def _try_write(self, key: str, change: Change[T]) -> bool:
        """Write once; returns False after a lost race, once the winner's value is in the view."""
        current, known = self._values.get(key), self._revisions.get(key, 0)
        wanted = change(current)
        if current == (wanted if wanted is None else self._decode(key, wanted)):
            return True
        headers = {"Nats-Expected-Last-Subject-Sequence": str(known)}
        if wanted is None:
            headers["KV-Operation"] = "DEL"
        try:
            stored = await self._broker.store(self._subject(key), wanted or b"", headers)
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
            except (NatsError, BrokerUnavailable, OSError) as error:
                log.warning("kv_view_interrupted", bucket=self._name, error=repr(error))
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:  # a bug of ours or of an observer: a dead view would be worse
                log.exception("kv_view_failed", bucket=self._name)
                await asyncio.sleep(RETRY_SECONDS)

    async def _reload(self) -> None:
        """Replace all values by those in the bucket and those republished while it was read."""
        self._stale.clear()
        await declare_bucket(self._broker, self._name, self._replicas)
        if self._subscription is None:
            subject = _changes_subject(self._name)
            self._subscription = await self._broker.subscribe(subject, self._on_republished)
        self._came_while_reading = []
        found = await self._broker.read_subject(f"KV_{self._name}", self._subject(">"))
        entries = [self._to_entry(m.subject, m.seq, m.data, m.headers) for m in found]
        self._replace(entries + self._came_while_reading)
        self._came_while_reading = None

    def _replace(self, entries: list[KvEntry]) -> None:
        before = self._revisions
        self._values, self._revisions = {}, {}
        for entry in entries:
            self._apply(entry)
        if self._revisions != before or not self._is_synced:
            self._is_synced = True
            self._notify_observers()

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
        self._values.pop(entry.key, None)
        if entry.value is not None:
            self._decode_value(entry.key, entry.value)
        return True

    def _decode_value(self, key: str, value: bytes) -> None:
        try:
            self._values[key] = self._decode(key, value)
        except ValueError as error:
            log.error("record_unreadable", bucket=self._name, key=key, error=str(error))

    def _notify_observers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for observer in self._observers:
            observer()


async def declare_bucket(broker: Broker, name: str, replicas: int) -> None:
    """Create a KV bucket, or update one to republish its changes and to allow direct gets.

    The number of replicas may grow, but is never lowered. Safe from several services at once: one
    that comes too late gets nats-py's error, and its view tries again. Raises nats-py's errors or
    `BrokerUnavailable`.
    """
    republish = RePublish(src=f"$KV.{name}.>", dest=_changes_subject(name))
    try:
        known = (await declaration.stream_info(broker, f"KV_{name}")).config
    except NotFoundError:
        await broker.js.add_stream(_bucket_config(name, replicas, republish))
        return
    replicas = max(replicas, known.num_replicas or 1)
    wanted = known.evolve(republish=republish, allow_direct=True, num_replicas=replicas)
    if wanted.as_dict() != known.as_dict():
        await broker.js.update_stream(wanted)


def _changes_subject(name: str) -> str:
    return f"{PREFIX}.changed.{name}.>"


def _bucket_config(name: str, replicas: int, republish: RePublish) -> StreamConfig:
    """Configure a KV bucket as every NATS client does (ADR-8), with republishing."""
    return StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_bytes=MAX_BYTES,
        num_replicas=replicas,
        storage=StorageType.FILE,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
        republish=republish,
    )

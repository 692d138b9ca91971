"""Records in a stream of one message per subject: changed by compare-and-set, read by direct get.

For state that grows with use, which no process keeps in memory.
"""

import builtins
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Generic, TypeVar

import structlog

from streams.broker.broker_client import Broker, StoredMessage, StoreRefused
from streams.errors import BrokerUnavailable, StorageFull
from streams.headers import EXPECTED_LAST
from streams.records.cas.cas_record import CasRecord

log = structlog.get_logger()
STORE_SECONDS = 10.0  # for which a record is tried again while the broker does not answer


R = TypeVar("R", bound=CasRecord)


class RecordChanged(Exception, Generic[R]):
    """Another process has stored `newer` in place of a record; None: it has removed the record."""

    def __init__(self, newer: R | None) -> None:
        super().__init__()
        self.newer = newer


class RecordUnreadable(BrokerUnavailable):
    """A record is stored that this process cannot read; nothing may be concluded from it."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"the record {subject} cannot be read: its bytes are of no such record")


class CasRecords(Generic[R]):
    """The records of one stream. `unpack` makes one of a message's payload and its sequence."""

    def __init__(self, broker: Broker, stream: str, unpack: Callable[[bytes, int], R]) -> None:
        self._broker, self._stream, self._unpack = broker, stream, unpack

    async def read(self, subject: str) -> R | None:
        """Return a record as some replica has it; it may be out of date. Raises as `list` does."""
        found = await self._broker.read(self._stream, {"last_by_subj": subject})
        return self._read_message(found[0]) if found else None

    async def read_newest(self, subject: str) -> R | None:
        """Return a record as the leader has it; None if there is none. Raises as `list` does."""
        query = {"last_by_subj": subject}
        found = await self._broker.read_from_leader(self._stream, query)
        return self._read_message(found) if found else None

    async def read_sound(self, subject: str) -> R | None:
        """Return a record as `read_newest`; raises `RecordUnreadable` for one that is none."""
        found = await self._broker.read_from_leader(self._stream, {"last_by_subj": subject})
        record = self._read_message(found) if found else None
        if found and record is None:
            raise RecordUnreadable(subject)
        return record

    async def list(self, pattern: str) -> list[R]:
        """Return all records on the subjects that match a filter; raises `BrokerUnavailable`.

        As some replica has them: one that was just stored may be missing.
        """
        return self._read_messages(await self._broker.read_subject(self._stream, pattern))

    async def list_newest(self, pattern: str) -> builtins.list[R]:
        """Return all records as `list`, with all that was stored before this call."""
        return self._read_messages(await self._broker.read_current_subjects(self._stream, pattern))

    def _read_messages(self, found: Iterable[StoredMessage]) -> builtins.list[R]:
        return [record for message in found if (record := self._read_message(message))]

    def _read_message(self, message: StoredMessage) -> R | None:
        """Return the record; None, with a log event, if it cannot be read.

        It is as if it were not there: whoever may write records may write anything, and a record
        of one tenant must not end what is done for others.
        """
        try:
            return self._unpack(message.data, message.seq)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("record_unreadable", subject=message.subject, reason=repr(error))
            return None

    async def write(self, subject: str, record: R) -> R:
        """Store a record if its revision is still the newest, and return it with its new one.

        Raises `RecordChanged`, `StorageFull`, or `BrokerUnavailable`.
        """
        headers = {EXPECTED_LAST: str(record.revision)}
        try:
            stored = await self._broker.store_retrying(
                subject, record.pack(), headers, STORE_SECONDS
            )
        except StoreRefused as refusal:
            if refusal.is_full:
                raise StorageFull(f"the stream {self._stream} is full") from None
            if not refusal.is_conflict:
                raise
        else:
            return replace(record, revision=stored.seq)
        newer = await self.read_newest(subject)
        if newer and newer.pack() == record.pack():  # it is ours: only the first answer was lost
            return newer
        raise RecordChanged(newer)

    async def change(self, subject: str, record: R, apply: Callable[[R], R]) -> R | None:
        """Store `apply(record)` in place of a record, and return it; None if it was removed.

        If another process was faster, `apply` is given what that has stored. Raises whatever
        `apply` raises, and as `write` does.
        """
        while True:
            try:
                return await self.write(subject, apply(record))
            except RecordChanged as conflict:
                if conflict.newer is None:
                    return None
                record = conflict.newer

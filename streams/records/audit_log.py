"""The audit log in the stream AUDIT: appended by any number of processes, and never changed."""

import asyncio
from dataclasses import dataclass

from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

from streams import subjects, topology
from streams.broker import declaration
from streams.broker.broker_client import Broker, StoreRefused, StreamMissing
from streams.broker.responses import MessagePage
from streams.errors import BrokerUnavailable, MillstreamError
from streams.records.audit_chain import GENESIS, AuditEvent, AuditRecord, ChainHead, hash_line

ALARM_RATIO, FULL_RATIO = 0.7, 0.9
EXPECTED_LAST_OF_STREAM = "Nats-Expected-Last-Sequence"
_STORE_SECONDS = 5.0


class AuditFull(MillstreamError):
    """The audit log has no room for further changes, so none is made."""

    code = "audit_full"

    def __init__(self, use: "AuditUse") -> None:
        super().__init__(
            f"the audit log of {use.max_bytes} bytes is full to {use.ratio:.0%}, so nothing is "
            "changed: start the admin services with a larger --audit-bytes"
        )
        self.use = use


@dataclass(frozen=True)
class AuditUse:
    """Bytes in the audit log, and its limit (0: none)."""

    stored_bytes: int = 0
    max_bytes: int = 0

    @property
    def ratio(self) -> float:
        """The part of the log that is in use, 0 to 1; 0 if it has no limit."""
        return self.stored_bytes / self.max_bytes if self.max_bytes else 0.0

    @property
    def is_filling(self) -> bool:
        """True from 70 % on: it is time for a larger one."""
        return self.ratio >= ALARM_RATIO

    @property
    def is_full(self) -> bool:
        """True from 90 % on: no change begins, and the rest is for the ends of those begun."""
        return self.ratio >= FULL_RATIO


@dataclass(frozen=True)
class _Tail:
    """End of the chain, which the next record follows: the last one's sequence and hash."""

    sequence: int
    digest: str
    use: AuditUse


class AuditLog:
    """Appends records by compare-and-set: each one follows the last, whoever wrote that.

    `use` is as it was at the last `append` or `read_use`. `archived` is the head that the first
    record of an empty log follows, by default none.
    """

    def __init__(self, broker: Broker, archived: ChainHead | None = None) -> None:
        self._broker = broker
        self._first_previous = archived.digest if archived else GENESIS
        self._lock = asyncio.Lock()
        self.use = AuditUse()

    async def append(self, record: AuditRecord) -> int:
        """Store a record after the last one, and return its sequence.

        Raises `AuditFull` if there is no room: for `intended` and `refused` from 90 % on, so that
        the changes that have begun can be ended. Raises `BrokerUnavailable` if the broker does not
        answer; the record may have been stored then.
        """
        subject = subjects.audit(record.target.partition(" ")[0])
        async with self._lock:
            while True:
                tail = await self._read_tail()
                if tail.use.is_full and record.event in (AuditEvent.INTENDED, AuditEvent.REFUSED):
                    raise AuditFull(tail.use)
                sequence = tail.sequence + 1
                line = record.encode(sequence, tail.digest, self._broker.clock.now_ms())
                if await self._try_store(subject, line, tail):
                    return sequence

    async def _try_store(self, subject: str, line: bytes, tail: _Tail) -> bool:
        """Store a line after `tail`; returns False if there is another one."""
        headers = {EXPECTED_LAST_OF_STREAM: str(tail.sequence)}
        try:
            await self._broker.store_retrying(subject, line, headers, _STORE_SECONDS)
        except StoreRefused as refusal:
            if refusal.is_full:
                raise AuditFull(tail.use) from refusal
            if not refusal.is_conflict:
                raise
            found = await self._broker.get(topology.AUDIT, tail.sequence + 1)
            return found is not None and found.data == line  # ours, whose confirmation was lost
        return True

    async def _read_tail(self) -> _Tail:
        """Return the end of the log: that of an empty one is before all records."""
        info = await self._read_info()
        use = self.use
        if not info.state.messages:
            return _Tail(info.state.last_seq, self._first_previous, use)
        last = await self._broker.get(topology.AUDIT, info.state.last_seq)
        if last is None:
            raise BrokerUnavailable(
                f"the last record of the audit log, {info.state.last_seq}, cannot be read"
            )
        return _Tail(last.seq, hash_line(last.data), use)

    async def read_use(self) -> AuditUse:
        """Return how full the log is now; raises `BrokerUnavailable`, also if there is no log."""
        await self._read_info()
        return self.use

    async def _read_info(self) -> StreamInfo:
        try:
            info = await declaration.stream_info(self._broker, topology.AUDIT)
        except NotFoundError:
            raise StreamMissing("there is no audit log; it is about to be made anew") from None
        self.use = AuditUse(info.state.bytes, max(0, info.config.max_bytes or 0))
        return info

    async def read(self, after: int) -> MessagePage:
        """Return the next records with sequences above `after`, as lines; raises as `read_page`."""
        return await self._broker.read_filtered(topology.AUDIT, subjects.ALL_AUDIT, after)

"""Log subscription: passes one token log to one reader, each record once and in order. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from gateway.replies.log_cursor import LogCursor, OutputGap
from gateway.replies.subscription_deadlines import SubscriptionDeadlines
from streams import messages
from streams.messages import Record

# Takes a record and its size in bytes; returns False when it is full, until `Relay.unpause`
Sink = Callable[[Record, int], bool]
# A republished record: its sequence, that of the record before it in the same log, its bytes
Reply = tuple[int, int, bytes]

_SEQUENCES = re.compile(rb"Nats-Sequence: (\d+)\r\n(?:.*\r\n)*?Nats-Last-Sequence: (\d+)\r\n")


class StoredRecord(NamedTuple):
    """A record read from a token log: its sequence number in the stream, and its packed bytes."""

    seq: int
    data: bytes


def parse_sequences(headers: bytes) -> tuple[int, int]:
    """Return the stream sequences of a republished record and of the record before it in its log.

    `headers` are the message's raw headers. The second number is 0 for the first record of a log.
    Asserts that both are there, since the broker adds them to every republished record.
    """
    match = _SEQUENCES.search(headers)
    assert match, headers
    seq, before = match.groups()
    return int(seq), int(before)


def discard_record(record: Record, size: int) -> bool:
    """Drop a record and return True; the sink of a subscription whose reader has left."""
    return True


class DeliveryState(Enum):
    """The way a log subscription treats the records of its log at present."""

    LIVE = auto()  # replies are passed on as they come
    STALE = auto()  # replies are left out: the log is to be read, which gives them, too
    READING = auto()  # the log is being read; replies wait until that ends
    PAUSED = auto()  # the sink is full, and nothing is passed on until `unpause`
    ENDED = auto()  # the last record of the request was passed on


@dataclass
class LogSource:
    """The places of a request's token log: the broker, and the worker that writes it.

    A token log is a request's stored answer.
    """

    tenant: str
    request_id: str
    stream: str
    subject_filter: str  # matches the subject of the log
    subject: str | None = None  # subject of the log, once there was one
    # Subject at which the log's writer is asked; empty: read the broker; None: not yet known
    writer_subject: str | None = ""
    writer_searches: int = 0  # searches for the writer so far


@dataclass(eq=False)
class LogSubscription:
    """One reader's subscription to one token log: each record goes to `sink` once and in order.

    A sink takes a record and its size in bytes, and returns False when it is full. Records come as
    replies (records that the broker republishes), which may be lost or repeated, and in pages read
    from the log. A reply names the sequence of the record before it, so a gap is noticed.
    """

    source: LogSource
    sink: Sink
    deadlines: SubscriptionDeadlines
    cursor: LogCursor = field(default_factory=LogCursor)
    state: DeliveryState = DeliveryState.LIVE
    is_durable: bool = False  # the request has a log, or a place in a queue
    _deferred_replies: list[Reply] = field(default_factory=list)  # came while the log was read

    @property
    def request_id(self) -> str:
        """The id of the request whose log this is."""
        return self.source.request_id

    @property
    def is_ended(self) -> bool:
        """True once the last record of the request was passed on."""
        return self.state is DeliveryState.ENDED

    @property
    def takes_records(self) -> bool:
        """True while records can be passed on: the sink has room and the request has not ended."""
        return self.state is not DeliveryState.PAUSED and self.state is not DeliveryState.ENDED

    @property
    def has_reader(self) -> bool:
        """True while the reader is here and the request neither ended nor is being cancelled."""
        return not self.is_ended and self.deadlines.has_reader

    def receive_reply(self, seq: int, before: int, data: bytes) -> bool:
        """Take a republished record; return False if records before it are missing.

        The caller must then read the log. True means that the record was passed on, was seen
        before, is kept until a running read ends, or is left to a later read of the log. `before`
        is the sequence of the record before it in the log.
        """
        if self.state is DeliveryState.LIVE:
            if before == self.cursor.last_seq:
                self.consume_record(seq, data)
            elif seq > self.cursor.last_seq:
                self.state = DeliveryState.STALE
                return False
        elif self.state is DeliveryState.READING:
            self._deferred_replies.append((seq, before, data))
        return True

    def consume_record(self, seq: int, data: bytes) -> bool:
        """Pass on the record that follows the last one; return True if the sink takes more.

        False if the sink is full now or the record was the last one of the request. Parts that the
        sink has had already are left out.
        """
        self.deadlines.mark_record()
        try:
            record = self.cursor.advance(seq, data)
        except OutputGap:
            self.fail("log_lost", "the broker has lost a part of this request's output")
            return False
        if record is None:
            return True
        if is_last := record["type"] in messages.TERMINAL_TYPES:
            self.state = DeliveryState.ENDED
        has_room = self.sink(record, len(data))
        if not (has_room or is_last):
            self.state = DeliveryState.PAUSED
        return has_room and not is_last

    def consume_page(self, page: Sequence[StoredRecord], now: float) -> bool:
        """Pass on records read from `cursor.read_from_seq` on; return True if the sink takes more.

        False if the sink is full or the request has ended. A page that does not begin with the
        record taken last shows that the broker has lost the log, or has another copy of it; then
        nothing is passed on, the cursor goes back to the log's begin, and the caller reads it again
        from there.
        """
        if not self.takes_records:
            return False
        last_seq = self.cursor.last_seq
        if not last_seq:
            return all(self.consume_record(*stored) for stored in page)
        if page and page[0] == (last_seq, self.cursor.last_data):
            return all(self.consume_record(*stored) for stored in page[1:])
        is_newer = bool(page) and page[0].seq > last_seq
        if is_newer:
            self.source.writer_subject = None
        self.cursor.restart(only_rest=is_newer)
        self.deadlines.mark_lost(now)
        return True

    def begin_reading(self) -> None:
        """Keep replies from now on, since the log is being read; not if the sink takes none."""
        if self.takes_records:
            self.state = DeliveryState.READING

    def finish_reading(self) -> bool:
        """Take the replies that came while the log was read, and be live again.

        Returns False if records before them are missing; the caller must then read the log again.
        """
        replies, self._deferred_replies = self._deferred_replies, []
        if self.state is DeliveryState.READING:
            self.state = DeliveryState.LIVE
        return all(self.receive_reply(*reply) for reply in replies)

    def abort_reading(self) -> None:
        """Drop the replies that came while the log was read, since it is read once more."""
        self._deferred_replies = []
        self.mark_stale()

    def mark_stale(self) -> None:
        """Leave out replies until the log was read, which the caller does."""
        if self.takes_records:
            self.state = DeliveryState.STALE

    def unpause(self) -> bool:
        """Note that the sink takes records again; return True if the log must be read for it."""
        was_paused = self.state is DeliveryState.PAUSED
        if was_paused:
            self.state = DeliveryState.STALE
        return was_paused

    def fail(self, code: str, message: str) -> None:
        """End the request for its reader with an error record of this gateway's own.

        For requests whose last record will never come. Does nothing if the request has ended
        already.
        """
        if not self.is_ended:
            self.state = DeliveryState.ENDED
            self.sink(messages.error_record(code, message, messages.openai_usage(0, 0)), 0)

    def end(self) -> None:
        """Pass on nothing more."""
        self.state, self.sink = DeliveryState.ENDED, discard_record

    def doubt(self, now: float) -> None:
        """Treat a request without any record as lost, because its place in a queue may be gone.

        Does nothing if a record has come.
        """
        if not self.cursor.last_seq:
            self.deadlines.mark_lost(now)

    def needs_cancel(self, now: float) -> bool:
        """Return True if a cancel message is due for a request that has not ended."""
        return self.deadlines.needs_cancel(now) and not self.is_ended

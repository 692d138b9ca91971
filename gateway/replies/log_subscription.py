"""Log subscription: one reader's position in one token log; it gets each record once. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streams import messages
from streams.messages import Record

# Takes a record and its size in bytes; returns False when it is full, until `Relay.unpause`
Sink = Callable[[Record, int], bool]
# A republished record: its sequence, that of the record before it in the same log, its bytes
Reply = tuple[int, int, bytes]

_SEQUENCES = re.compile(rb"Nats-Sequence: (\d+)\r\n(?:.*\r\n)*?Nats-Last-Sequence: (\d+)\r\n")
FIRST_CHECK_SECONDS, MAX_CHECK_SECONDS = 5.0, 60.0
FIRST_SEARCH_SECONDS, SEARCH_SECONDS = 1.0, 5.0
FIRST_CANCEL_SECONDS, MAX_CANCEL_SECONDS = 0.25, 4.0


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


@dataclass(eq=False)
class LogSubscription:
    """One reader's position in one token log: passes each record to `sink` once and in order.

    A token log is a request's stored answer. A sink takes a record and its size in bytes, and
    returns False when it is full. Records come as replies (records that the broker republishes),
    which may be lost or repeated, and in pages read from the log. A reply names the sequence of the
    record before it, so a gap is noticed. The broker may lose a log, and its writer then put it
    back under other sequences; another attempt may divide the same tokens into other records. In
    both cases token indices and numbers of characters decide what the sink has had already. Times
    are seconds of any one clock, passed by the caller.
    """

    tenant: str
    request_id: str
    stream: str
    subject_filter: str  # matches the subject of the log
    sink: Sink
    last_heard_at: float
    expires_at: float  # the request has ended by then, whatever happens
    after_index: int = -1  # index of the last token (or vector) that the reader had before
    after_characters: int | None = None  # characters that it had before; None: it does not say
    # Subject at which the log's writer is asked; empty: read the broker; None: not yet known
    writer_subject: str | None = ""
    writer_searches: int = 0  # searches for the writer so far
    subject: str | None = None  # subject of the log, once there was one
    is_durable: bool = False  # the request has a log, or a place in a queue
    is_ended: bool = False
    is_paused: bool = False  # the sink is full; later records are read from the log then
    is_suspect: bool = False  # the log may be another one: it is read before replies are taken
    last_seq: int = 0  # sequence of the last record that was taken
    last_data: bytes = b""  # bytes of that record
    delivered_tokens: int = 0  # tokens (or vectors) that the sink has had
    delivered_characters: int = 0  # characters that the sink has had
    log_characters: int = 0  # characters in the log, up to the last record that was taken
    attempt: int = 0  # the latest attempt that the sink knows of
    lost_at: float | None = None  # when the log was found to be gone
    search_at: float = 0.0  # when to ask for a lost log again
    orphaned_until: float | None = None  # end of the grace period, once the reader has left
    check_seconds: float = field(default_factory=lambda: FIRST_CHECK_SECONDS)
    cancel_at: float | None = None  # when to send the next cancel; None: not to be cancelled
    cancel_retry_seconds: float = FIRST_CANCEL_SECONDS
    is_catching_up: bool = False
    deferred_replies: list[Reply] = field(default_factory=list)  # came during a catch-up

    @property
    def has_reader(self) -> bool:
        """True while the reader is here and the request neither ended nor is being cancelled."""
        return not self.is_ended and self.orphaned_until is None and self.cancel_at is None

    def receive_reply(self, seq: int, before: int, data: bytes) -> bool:
        """Take a republished record; return False if records before it are missing.

        The caller must then read the log. True means that the record was passed on, was seen
        before, is kept until a running catch-up ends, or is left to a later read of the log because
        the sink is full. `before` is the sequence of the record before it in the log.
        """
        if self.is_catching_up:
            self.deferred_replies.append((seq, before, data))
        elif self.is_paused or self.is_ended or self.is_suspect:
            pass
        elif before == self.last_seq:
            self.consume_record(seq, data)
        else:
            return seq <= self.last_seq
        return True

    def consume_record(self, seq: int, data: bytes) -> bool:
        """Pass on the record that follows the last one; return True if the sink takes more.

        False if the sink is full now or the record was the last one of the request. Parts that the
        sink has had already are left out.
        """
        self.last_seq, self.last_data, self.check_seconds = seq, data, FIRST_CHECK_SECONDS
        if record := self._undelivered_part(messages.unpack(data)):
            self.is_ended = record["type"] in messages.TERMINAL_TYPES
            self.is_paused = not self.sink(record, len(data))
        return not (self.is_paused or self.is_ended)

    def consume_page(self, page: Sequence[StoredRecord], now: float) -> bool:
        """Pass on records read from the log at `read_from_seq`; return True if the sink takes more.

        False if the sink is full or the request has ended. A page that does not begin with the
        record taken last shows that the broker has lost the log, or has another copy of it; then
        nothing is passed on, `last_seq` becomes 0, and the caller reads the log again from its
        begin.
        """
        if self.is_ended or self.is_paused:
            return False
        self.is_suspect = False
        if not self.last_seq:
            return all(self.consume_record(*stored) for stored in page)
        if page and page[0] == (self.last_seq, self.last_data):
            return all(self.consume_record(*stored) for stored in page[1:])
        if page and page[0].seq > self.last_seq:
            self.after_index, self.writer_subject = (
                max(self.after_index, self.delivered_tokens - 1),
                None,
            )
        self.last_seq, self.log_characters = 0, 0
        self.lost_at, self.search_at = now, now + FIRST_SEARCH_SECONDS
        return True

    @property
    def read_from_seq(self) -> int:
        """The stream sequence at which to read the log: that of the record taken last, at least 1.

        That record is read again to make sure that the log is still the same one.
        """
        return max(1, self.last_seq)

    def fail(self, code: str, message: str) -> None:
        """End the request for its reader with an error record of this gateway's own.

        For requests whose last record will never come. Does nothing if the request has ended
        already.
        """
        if not self.is_ended:
            self.is_ended = True
            self.sink(messages.error_record(code, message, messages.openai_usage(0, 0)), 0)

    def needs_check(self, now: float) -> bool:
        """Return True if no reply has come for a while, so that the log should be read.

        The while is 5 s at first and is doubled by each check up to 60 s, because requests that
        wait in a queue have no replies.
        """
        return now - self.last_heard_at > self.check_seconds

    def mark_checked(self, now: float) -> None:
        """Note that the silent log is being read now; the time to the next check doubles."""
        self.last_heard_at = now
        self.check_seconds = min(2 * self.check_seconds, MAX_CHECK_SECONDS)

    def doubt(self, now: float) -> None:
        """Treat a request without any record as lost, because its place in a queue may be gone.

        `needs_search` then becomes True after a second, as for a lost log. Does nothing if a record
        has come.
        """
        if not self.last_seq and self.lost_at is None:
            self.lost_at, self.search_at = now, now + FIRST_SEARCH_SECONDS

    def is_lost(self, now: float, seconds: float = 0.0) -> bool:
        """Return True if the log was lost at least `seconds` ago and no record has come since.

        A log is lost when the broker no longer has it, or when the request has no record and its
        place in a queue is in doubt.
        """
        return self.lost_at is not None and not self.last_seq and now >= self.lost_at + seconds

    def needs_search(self, now: float) -> bool:
        """Return True if the log is lost and it is time to ask who has it.

        The first search is due a second after the loss, since the log's writer may put it back by
        then.
        """
        return self.is_lost(now) and now >= self.search_at

    def mark_searched(self, now: float) -> None:
        """Note that somebody is being asked for the lost log; the next search is due in 5 s."""
        self.search_at = now + SEARCH_SECONDS

    def is_abandoned(self, now: float) -> bool:
        """Return True if the reader left, its grace period is over, and no cancel was begun."""
        grace_ends_at = self.orphaned_until
        return grace_ends_at is not None and now >= grace_ends_at and self.cancel_at is None

    def needs_cancel(self, now: float) -> bool:
        """Return True if a cancel message is due: `cancel_at` has come, and no end has."""
        return self.cancel_at is not None and now >= self.cancel_at and not self.is_ended

    def mark_cancel_sent(self, now: float) -> None:
        """Note that a cancel message was sent at `now`, and when to send the next one.

        A message may get lost, so they are repeated until the request ends: first after 0.25 s,
        then after pauses that double up to 4 s.
        """
        self.cancel_at = now + self.cancel_retry_seconds
        self.cancel_retry_seconds = min(2 * self.cancel_retry_seconds, MAX_CANCEL_SECONDS)

    def _undelivered_part(self, record: Record) -> Record | None:
        """The part of a record that the sink has not had, or None; a gap ends the request."""
        kind = record["type"]
        if kind == "chunk" or kind == "result":
            return self._undelivered_output(record)
        if kind == "started":
            latest_known, self.attempt = self.attempt, max(self.attempt, record["attempt"])
            return record if self.attempt > latest_known else None
        return None if self.is_ended else record

    def _undelivered_output(self, record: Record) -> Record | None:
        text, count = record.get("text", ""), record["count"]
        before = record.get("characters", self.log_characters)
        self.log_characters = before + len(text)
        if (
            not self.delivered_tokens
            and "characters" in record
            and record["index"] <= self.after_index + 1
        ):
            self.delivered_tokens, self.delivered_characters = self._begin(record["index"], before)
        skip_tokens = self.delivered_tokens - record["index"]
        skip_characters = self.delivered_characters - before
        if skip_tokens >= count and skip_characters >= len(text):
            return None
        if not (0 <= skip_tokens <= count and 0 <= skip_characters <= len(text)):
            self.fail("log_lost", "the broker has lost a part of this request's output")
            return None
        self.delivered_tokens, self.delivered_characters = (
            record["index"] + count,
            self.log_characters,
        )
        if skip_tokens or skip_characters:
            return _drop_delivered(record, skip_tokens, skip_characters)
        return record

    def _begin(self, index: int, before: int) -> tuple[int, int]:
        """Return the tokens and characters that count as delivered as the first chunk comes.

        That is what the reader says. One that does not know its number of characters gets the first
        chunk, which has the token `index` after `before` characters, whole.
        """
        if self.after_characters is None:
            return index, before
        return self.after_index + 1, self.after_characters


def _drop_delivered(record: Record, count: int, characters: int) -> Record:
    """A `chunk` or `result` without its first `count` tokens or vectors, and without their text."""
    rest = record | {"index": record["index"] + count, "count": record["count"] - count}
    for name in record.keys() & {"tokens", "logprobs", "vectors"}:
        rest[name] = record[name][count:]
    return rest | ({"text": record["text"][characters:]} if "text" in record else {})

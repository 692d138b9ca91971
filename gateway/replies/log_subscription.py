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
    """A record as it was read from the log: its sequence in the stream, and its bytes."""

    seq: int
    data: bytes


def parse_sequences(headers: bytes) -> tuple[int, int]:
    """Return the sequences of a republished record and of the one before it in the same log."""
    match = _SEQUENCES.search(headers)
    assert match, headers
    seq, before = match.groups()
    return int(seq), int(before)


def discard_record(record: Record, size: int) -> bool:
    """Take and drop a record: the sink of a request that nobody reads."""
    return True


@dataclass(eq=False)
class LogSubscription:
    """Feeds `sink` each record once and in order, from replies that may be lost or repeated.

    A reply names the sequence of the record before it in the log, so a gap is noticed. The broker
    may lose a log and its writer put it back under other sequences, or another attempt may cut the
    same tokens into other records: then the tokens' indices, and the number of characters, tell
    what the sink has had. Times are the caller's, in seconds of any one clock.
    """

    tenant: str
    request_id: str
    stream: str
    subject_filter: str  # matches the subject of the log
    sink: Sink
    last_heard_at: float
    expires_at: float  # the request has ended by then, whatever happens
    after_index: int = -1  # index of the last token (or vector) that the reader had before
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
        """True while somebody wants the records: not ended, orphaned or cancelled."""
        return not self.is_ended and self.orphaned_until is None and self.cancel_at is None

    def receive_reply(self, seq: int, before: int, data: bytes) -> bool:
        """Take a reply; False if it shows a gap, so that the log must be read."""
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
        """Feed the record that follows the last one; False if the sink is full or has its end."""
        self.last_seq, self.last_data, self.check_seconds = seq, data, FIRST_CHECK_SECONDS
        if record := self._undelivered_part(messages.unpack(data)):
            self.is_ended = record["type"] in messages.TERMINAL_TYPES
            self.is_paused = not self.sink(record, len(data))
        return not (self.is_paused or self.is_ended)

    def consume_page(self, page: Sequence[StoredRecord], now: float) -> bool:
        """Feed records read from the log, from `read_from_seq` on; False if the sink is full.

        A page that does not begin with the last record taken shows that the log was lost. It may be
        of another log, the writer's copy, which must be read from its begin; or the log's begin is
        missing, which only the writer has.
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
        """The sequence at which to read on: the last record's, to see that it is still there."""
        return max(1, self.last_seq)

    def fail(self, code: str, message: str) -> None:
        """End with an error of our own, since no terminal will come from the log. Idempotent."""
        if not self.is_ended:
            self.is_ended = True
            self.sink(messages.error_record(code, message, messages.openai_usage(0, 0)), 0)

    def needs_check(self, now: float) -> bool:
        """True after a long silence, longer each time, since queued requests are silent."""
        return now - self.last_heard_at > self.check_seconds

    def mark_checked(self, now: float) -> None:
        """Note that the log is being read because of a silence; the next check comes later."""
        self.last_heard_at = now
        self.check_seconds = min(2 * self.check_seconds, MAX_CHECK_SECONDS)

    def doubt(self, now: float) -> None:
        """Have the request asked for if it has no record yet: its place in a queue may be gone."""
        if not self.last_seq and self.lost_at is None:
            self.lost_at, self.search_at = now, now + FIRST_SEARCH_SECONDS

    def is_lost(self, now: float, seconds: float = 0.0) -> bool:
        """True if the log has been gone for `seconds`, and its writer has not put it back."""
        return self.lost_at is not None and not self.last_seq and now >= self.lost_at + seconds

    def needs_search(self, now: float) -> bool:
        """True while the log is lost, after a delay in which its writer may put it back unasked."""
        return self.is_lost(now) and now >= self.search_at

    def mark_searched(self, now: float) -> None:
        """Note that the lost log is being asked for; the next time comes later."""
        self.search_at = now + SEARCH_SECONDS

    def is_abandoned(self, now: float) -> bool:
        """True when the grace period is over and the request is not being cancelled yet."""
        grace_ends_at = self.orphaned_until
        return grace_ends_at is not None and now >= grace_ends_at and self.cancel_at is None

    def needs_cancel(self, now: float) -> bool:
        """True when a cancel is due."""
        return self.cancel_at is not None and now >= self.cancel_at and not self.is_ended

    def mark_cancel_sent(self, now: float) -> None:
        """Note that a cancel was sent; it may get lost, so another one is due later."""
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
            self.delivered_tokens, self.delivered_characters = record["index"], before
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


def _drop_delivered(record: Record, count: int, characters: int) -> Record:
    """A `chunk` or `result` without its first `count` tokens or vectors, and without their text."""
    rest = record | {"index": record["index"] + count, "count": record["count"] - count}
    for name in record.keys() & {"tokens", "logprobs", "vectors"}:
        rest[name] = record[name][count:]
    return rest | ({"text": record["text"][characters:]} if "text" in record else {})

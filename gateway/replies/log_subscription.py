"""One reader's view of one token log: every record once, in order, as far as it has room. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streams import messages
from streams.messages import Record

# Takes a record and its size in bytes; False when it wants no more until it says so.
Sink = Callable[[Record, int], bool]
# What was republished: its sequence, that of the record before it in the same log, and the record.
Reply = tuple[int, int, bytes]

_SEQUENCES = re.compile(rb"Nats-Sequence: (\d+)\r\n(?:.*\r\n)*?Nats-Last-Sequence: (\d+)\r\n")
FIRST_CHECK_SECONDS, MAX_CHECK_SECONDS = 5.0, 60.0
FIRST_SEARCH_SECONDS, SEARCH_SECONDS = 1.0, 5.0
FIRST_CANCEL_SECONDS, MAX_CANCEL_SECONDS = 0.25, 4.0


class StoredRecord(NamedTuple):
    """A record as it was read from the log."""

    seq: int
    data: bytes


def parse_sequences(headers: bytes) -> tuple[int, int]:
    """Of a record that the broker republished, and of the one before it in the same log."""
    found = _SEQUENCES.search(headers)
    assert found, headers
    seq, before = found.groups()
    return int(seq), int(before)


def discard_record(record: Record, size: int) -> bool:
    """The sink of a request that nobody reads."""
    return True


@dataclass(eq=False)
class LogSubscription:
    """Feeds `sink` from replies that may be lost, repeated or too many.

    Records follow each other by their sequences in the log. The broker may lose a log and its
    writer put it back under other sequences, or another attempt say the same in other pieces: then
    the tokens' indices, and how much text there was, tell what the sink has had. Times are the
    caller's, in seconds of any one clock.
    """

    tenant: str
    request_id: str
    stream: str
    subject_filter: str  # that the subject of its log matches
    sink: Sink
    last_heard_at: float
    expires_at: float  # by then it has ended in any case
    after_index: int = -1  # index of the last token (or vector) that its reader has had before
    # Who is asked first (a subject); None while that is to be found out
    writer_subject: str | None = ""
    writer_searches: int = 0  # for its writer
    subject: str | None = None  # of its log, once there was one
    is_durable: bool = False  # it is durable: it has a log, or a place in a queue
    is_ended: bool = False
    is_paused: bool = False  # the sink is full; what comes meanwhile is read from the log later
    is_suspect: bool = False  # the log may be another one: nothing is taken before it was read
    last_seq: int = 0  # sequence of the last record that was taken
    last_data: bytes = b""  # that record
    delivered_tokens: int = 0  # how many tokens (or vectors) the sink has had
    delivered_characters: int = 0  # of text
    log_characters: int = 0  # characters of the log, up to its last record that was taken
    attempt: int = 0  # the latest of which the sink knows
    lost_at: float | None = None  # when the log was found to be gone
    search_at: float = 0.0  # when to ask who has it, while it is
    orphaned_until: float | None = None  # the end of the grace period, when nobody reads any more
    check_seconds: float = field(default_factory=lambda: FIRST_CHECK_SECONDS)
    cancel_at: float | None = None  # when to ask for its end again
    cancel_retry_seconds: float = FIRST_CANCEL_SECONDS
    is_catching_up: bool = False
    deferred_replies: list[Reply] = field(default_factory=list)  # what came during a catch-up

    @property
    def has_reader(self) -> bool:
        return not self.is_ended and self.orphaned_until is None and self.cancel_at is None

    def receive_reply(self, seq: int, before: int, data: bytes) -> bool:
        """Take a reply; False if it shows that the log must be read."""
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
        """Feed the record that follows the last one; False when the sink wants no more."""
        self.last_seq, self.last_data, self.check_seconds = seq, data, FIRST_CHECK_SECONDS
        if record := self._undelivered_part(messages.unpack(data)):
            self.is_ended = record["type"] in messages.TERMINAL_TYPES
            self.is_paused = not self.sink(record, len(data))
        return not (self.is_paused or self.is_ended)

    def consume_page(self, page: Sequence[StoredRecord], now: float) -> bool:
        """Feed what was read from the log, from `read_from` on; False when the sink wants no more.

        A log that does not begin with the last record seen is another one: the writer's copy. Or it
        has lost its beginning: then its writer has it.
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
        """The sequence at which to read on: that of the last record, to see that it is there."""
        return max(1, self.last_seq)

    def fail(self, code: str, message: str) -> None:
        """End with an error of our own, since the end in the log will not come. Idempotent."""
        if not self.is_ended:
            self.is_ended = True
            self.sink(messages.error_record(code, message, messages.openai_usage(0, 0)), 0)

    def needs_check(self, now: float) -> bool:
        """True when it was silent for long, and longer each time: waiting in a queue is silent."""
        return now - self.last_heard_at > self.check_seconds

    def mark_checked(self, now: float) -> None:
        self.last_heard_at = now
        self.check_seconds = min(2 * self.check_seconds, MAX_CHECK_SECONDS)

    def is_lost(self, now: float, seconds: float = 0.0) -> bool:
        """Whether its log has been gone for so long, and nobody has put it back."""
        return self.lost_at is not None and not self.last_seq and now >= self.lost_at + seconds

    def needs_search(self, now: float) -> bool:
        """True while the log is lost, a little later: who still writes it need not be asked."""
        return self.is_lost(now) and now >= self.search_at

    def mark_searched(self, now: float) -> None:
        """It is asked who has the log."""
        self.search_at = now + SEARCH_SECONDS

    def is_abandoned(self, now: float) -> bool:
        """True when the grace period is over and nobody has asked for its end yet."""
        until = self.orphaned_until
        return until is not None and now >= until and self.cancel_at is None

    def needs_cancel(self, now: float) -> bool:
        return self.cancel_at is not None and now >= self.cancel_at and not self.is_ended

    def mark_cancel_sent(self, now: float) -> None:
        """The cancel was sent. It may get lost, so another one is due a little later."""
        self.cancel_at = now + self.cancel_retry_seconds
        self.cancel_retry_seconds = min(2 * self.cancel_retry_seconds, MAX_CANCEL_SECONDS)

    def _undelivered_part(self, record: Record) -> Record | None:
        """What the sink has not had of it, if there is anything; a gap ends the request."""
        kind = record["type"]
        if kind == "chunk" or kind == "result":
            return self._undelivered_output(record)
        if kind == "started":
            known, self.attempt = self.attempt, max(self.attempt, record["attempt"])
            return record if self.attempt > known else None
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
        had, read = self.delivered_tokens - record["index"], self.delivered_characters - before
        if had >= count and read >= len(text):
            return None
        if not (0 <= had <= count and 0 <= read <= len(text)):
            self.fail("log_lost", "the broker has lost a part of this request's output")
            return None
        self.delivered_tokens, self.delivered_characters = (
            record["index"] + count,
            self.log_characters,
        )
        return _drop_delivered(record, had, read) if had or read else record


def _drop_delivered(record: Record, count: int, characters: int) -> Record:
    """An output without its first tokens, or vectors, and their text."""
    rest = record | {"index": record["index"] + count, "count": record["count"] - count}
    for name in record.keys() & {"tokens", "logprobs", "vectors"}:
        rest[name] = record[name][count:]
    return rest | ({"text": record["text"][characters:]} if "text" in record else {})

"""One reader's view of one token log: every record once, in order, as far as it has room. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streams import messages

Record = dict[str, Any]
# Takes a record and its size in bytes; False when it wants no more until it says so.
Sink = Callable[[Record, int], bool]
# What was republished: its sequence, that of the record before it in the same log, and the record.
Reply = tuple[int, int, bytes]

_SEQUENCES = re.compile(rb"Nats-Sequence: (\d+)\r\n(?:.*\r\n)*?Nats-Last-Sequence: (\d+)\r\n")
FIRST_LOOK_SECONDS, MOST_LOOK_SECONDS = 5.0, 60.0
FIRST_SEEK_SECONDS, SEEK_SECONDS = 1.0, 5.0
FIRST_CANCEL_SECONDS, MOST_CANCEL_SECONDS = 0.25, 4.0


class Stored(NamedTuple):
    """A record as it was read from the log."""

    seq: int
    data: bytes


def sequences(headers: bytes) -> tuple[int, int]:
    """Of a record that the broker republished, and of the one before it in the same log."""
    found = _SEQUENCES.search(headers)
    assert found, headers
    seq, before = found.groups()
    return int(seq), int(before)


def discard(record: Record, size: int) -> bool:
    """The sink of a request that nobody reads."""
    return True


@dataclass(eq=False)
class Following:
    """Feeds `sink` from replies that may be lost, repeated or too many.

    Records follow each other by their sequences in the log. The broker may lose a log and its
    writer put it back under other sequences, or another attempt say the same in other pieces: then
    the tokens' indices, and how much text there was, tell what the sink has had. Times are the
    caller's, in seconds of any one clock.
    """

    tenant: str
    request_id: str
    stream: str
    filter: str  # that the subject of its log matches
    sink: Sink
    heard: float
    expires: float  # by then it has ended in any case
    after: int = -1  # index of the last token (or vector) that its reader has had before
    writer: str | None = ""  # who is asked first (a subject); None while that is to be found out
    searches: int = 0  # for its writer
    subject: str | None = None  # of its log, once there was one
    known: bool = False  # it is durable: it has a log, or a place in a queue
    ended: bool = False
    paused: bool = False  # the sink is full; what comes meanwhile is read from the log later
    doubted: bool = False  # the log may be another one: nothing is taken before it was read
    last: int = 0  # sequence of the last record that was taken
    data: bytes = b""  # that record
    index: int = 0  # how many tokens (or vectors) the sink has had
    characters: int = 0  # of text
    passed: int = 0  # characters of the log, up to its last record that was taken
    attempt: int = 0  # the latest of which the sink knows
    lost: float | None = None  # when the log was found to be gone
    seek_at: float = 0.0  # when to ask who has it, while it is
    orphaned_until: float | None = None  # the end of the grace period, when nobody reads any more
    look_seconds: float = field(default_factory=lambda: FIRST_LOOK_SECONDS)
    cancel_at: float | None = None  # when to ask for its end again
    cancel_seconds: float = FIRST_CANCEL_SECONDS
    catching_up: bool = False
    meanwhile: list[Reply] = field(default_factory=list)  # what came during a catch-up

    @property
    def has_reader(self) -> bool:
        return not self.ended and self.orphaned_until is None and self.cancel_at is None

    def offer(self, seq: int, before: int, data: bytes) -> bool:
        """Take a reply; False if it shows that the log must be read."""
        if self.catching_up:
            self.meanwhile.append((seq, before, data))
        elif self.paused or self.ended or self.doubted:
            pass
        elif before == self.last:
            self.take(seq, data)
        else:
            return seq <= self.last
        return True

    def take(self, seq: int, data: bytes) -> bool:
        """Feed the record that follows the last one; False when the sink wants no more."""
        self.last, self.data, self.look_seconds = seq, data, FIRST_LOOK_SECONDS
        if record := self._rest(messages.unpack(data)):
            self.ended = record["type"] in messages.TERMINALS
            self.paused = not self.sink(record, len(data))
        return not (self.paused or self.ended)

    def read(self, page: Sequence[Stored], now: float) -> bool:
        """Feed what was read from the log, from `read_from` on; False when the sink wants no more.

        A log that does not begin with the last record seen is another one: the writer's copy. Or it
        has lost its beginning: then its writer has it.
        """
        if self.ended or self.paused:
            return False
        self.doubted = False
        if not self.last:
            return all(self.take(*stored) for stored in page)
        if page and page[0] == (self.last, self.data):
            return all(self.take(*stored) for stored in page[1:])
        if page and page[0].seq > self.last:
            self.after, self.writer = max(self.after, self.index - 1), None
        self.last, self.passed = 0, 0
        self.lost, self.seek_at = now, now + FIRST_SEEK_SECONDS
        return True

    @property
    def read_from(self) -> int:
        """The sequence at which to read on: that of the last record, to see that it is there."""
        return max(1, self.last)

    def fail(self, code: str, message: str) -> None:
        """End with an error of our own, since the end in the log will not come. Idempotent."""
        if not self.ended:
            self.ended = True
            self.sink(messages.failed(code, message, messages.usage(0, 0)), 0)

    def wants_look(self, now: float) -> bool:
        """True when it was silent for long, and longer each time: waiting in a queue is silent."""
        return now - self.heard > self.look_seconds

    def looked(self, now: float) -> None:
        self.heard = now
        self.look_seconds = min(2 * self.look_seconds, MOST_LOOK_SECONDS)

    def is_lost(self, now: float, seconds: float = 0.0) -> bool:
        """Whether its log has been gone for so long, and nobody has put it back."""
        return self.lost is not None and not self.last and now >= self.lost + seconds

    def wants_seek(self, now: float) -> bool:
        """True while the log is lost, a little later: who still writes it need not be asked."""
        return self.is_lost(now) and now >= self.seek_at

    def sought(self, now: float) -> None:
        """It is asked who has the log."""
        self.seek_at = now + SEEK_SECONDS

    def is_abandoned(self, now: float) -> bool:
        """True when the grace period is over and nobody has asked for its end yet."""
        until = self.orphaned_until
        return until is not None and now >= until and self.cancel_at is None

    def wants_cancel(self, now: float) -> bool:
        return self.cancel_at is not None and now >= self.cancel_at and not self.ended

    def cancelled(self, now: float) -> None:
        """The cancel was sent. It may get lost, so another one is due a little later."""
        self.cancel_at = now + self.cancel_seconds
        self.cancel_seconds = min(2 * self.cancel_seconds, MOST_CANCEL_SECONDS)

    def _rest(self, record: Record) -> Record | None:
        """What the sink has not had of it, if there is anything; a gap ends the request."""
        kind = record["type"]
        if kind == "chunk" or kind == "result":
            return self._rest_of_output(record)
        if kind == "started":
            known, self.attempt = self.attempt, max(self.attempt, record["attempt"])
            return record if self.attempt > known else None
        return None if self.ended else record

    def _rest_of_output(self, record: Record) -> Record | None:
        text, count = record.get("text", ""), record["count"]
        before = record.get("characters", self.passed)
        self.passed = before + len(text)
        if not self.index and "characters" in record and record["index"] <= self.after + 1:
            self.index, self.characters = record["index"], before
        had, read = self.index - record["index"], self.characters - before
        if had >= count and read >= len(text):
            return None
        if not (0 <= had <= count and 0 <= read <= len(text)):
            self.fail("log_lost", "the broker has lost a part of this request's output")
            return None
        self.index, self.characters = record["index"] + count, self.passed
        return _behind(record, had, read) if had or read else record


def _behind(record: Record, count: int, characters: int) -> Record:
    """An output without its first tokens, or vectors, and their text."""
    rest = record | {"index": record["index"] + count, "count": record["count"] - count}
    for name in record.keys() & {"tokens", "logprobs", "vectors"}:
        rest[name] = record[name][count:]
    return rest | ({"text": record["text"][characters:]} if "text" in record else {})

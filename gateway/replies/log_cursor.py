"""Log cursor: one reader's position in one token log, and how much output it has had. Pure."""

from dataclasses import dataclass

from streams import messages
from streams.messages import Record


class OutputGap(Exception):
    """A record begins behind what the reader has had: the broker has lost the output between."""


@dataclass
class LogCursor:
    """One reader's position in one token log: tells of each record what the reader has not had.

    The broker may lose a log, and its writer then put it back under other sequences; another
    attempt may divide the same tokens into other records. In both cases token indices and numbers
    of characters decide what the reader has had already.
    """

    after_index: int = -1  # index of the last token (or vector) that the reader had before
    after_characters: int | None = None  # characters that it had before; None: it does not say
    last_seq: int = 0  # sequence of the last record that was taken
    last_data: bytes = b""  # bytes of that record
    delivered_tokens: int = 0  # tokens (or vectors) that the reader has had
    delivered_characters: int = 0  # characters that the reader has had
    log_characters: int = 0  # characters in the log, up to the last record that was taken
    attempt: int = 0  # the latest attempt that the reader knows of

    @property
    def read_from_seq(self) -> int:
        """The stream sequence at which to read the log: that of the record taken last, at least 1.

        That record is read again to make sure that the log is still the same one.
        """
        return max(1, self.last_seq)

    def advance(self, seq: int, data: bytes) -> Record | None:
        """Move behind the log's next record; return what the reader has not had of it, or None.

        `seq` is the record's sequence in the stream, `data` its packed bytes. Raises `OutputGap` if
        output between it and what the reader has had is missing.
        """
        self.last_seq, self.last_data = seq, data
        record: Record = messages.unpack_record(data)
        kind = record["type"]
        if kind == "chunk" or kind == "result":
            return self._advance_output(record)
        if kind == "started":
            latest_known, self.attempt = self.attempt, max(self.attempt, record["attempt"])
            return record if self.attempt > latest_known else None
        return record

    def restart(self, *, only_rest: bool) -> None:
        """Move to the begin of the log, since it is another one than the one that was read.

        With `only_rest` the reader does not ask for the output that it has had.
        """
        if only_rest:
            self.after_index = max(self.after_index, self.delivered_tokens - 1)
        self.last_seq, self.log_characters = 0, 0

    def _advance_output(self, record: Record) -> Record | None:
        text, count = record.get("text", ""), record["count"]
        before = record.get("characters", self.log_characters)
        self.log_characters = before + len(text)
        if (
            not (self.delivered_tokens or self.delivered_characters)
            and "characters" in record
            and record["index"] <= self.after_index + 1
        ):
            self.delivered_tokens, self.delivered_characters = self._begin(record["index"], before)
        skip_tokens = self.delivered_tokens - record["index"]
        skip_characters = self.delivered_characters - before
        if skip_tokens >= count and skip_characters >= len(text):
            return None
        if not (0 <= skip_tokens <= count and 0 <= skip_characters <= len(text)):
            raise OutputGap
        self.delivered_tokens = record["index"] + count
        self.delivered_characters = self.log_characters
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

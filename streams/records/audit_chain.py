"""Records of the audit log, and the chain of hashes that joins them. Pure.

A record is one line of JSON. It holds the SHA-256 of the line before it, so whoever changes,
removes or inserts one breaks the chain at the next; and whoever keeps a head elsewhere sees that
records were cut off at the end.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import orjson

from streams.errors import MillstreamError

GENESIS = "0" * 64  # what the first record of all holds as the hash of the one before it
_HEAD = re.compile(r"(\d{1,19}):([0-9a-f]{64})")
_KEEP_BYTES = 16_384  # of a value; of a larger one its size and hash are kept
_LEAST_BYTES = 512  # an object that may take fewer is not kept in part
JsonValue = dict[str, Any] | None


class AuditEvent(StrEnum):
    """Content of a record: a change, or how it ended."""

    INTENDED = "intended"  # it is about to be made
    DONE = "done"  # it is stored
    ABANDONED = "abandoned"  # it was not made: another writer was faster, or the broker refused
    REFUSED = "refused"  # the caller may not make it


@dataclass(frozen=True)
class AuditRecord:
    """One line of the audit log: who did what, from where, with the values before and after.

    `change` is a random id that the records of one change have in common. `who` is a key's id or
    name, `address` where the caller's connection came from, if known. `operation` is as in
    the admin API's table, `target` the record, such as `tenant acme`. `before` and `after` are None
    where there is no such record, and in all records but `intended`. `at` is in epoch milliseconds
    by the cluster's clock, `process` the admin service that wrote it.
    """

    event: AuditEvent
    change: str
    who: str
    operation: str
    target: str
    address: str = ""
    process: str = ""
    before: JsonValue = None
    after: JsonValue = None
    reason: str = ""
    untold: int = 0  # refusals like this one since the last that was recorded

    def encode(self, sequence: int, previous: str, at: int) -> bytes:
        """Return the line: this record at a sequence of the log, after the line with that hash."""
        line = {"sequence": sequence, "previous": previous, "at": at, **vars(self)}
        return orjson.dumps(line)


def shorten(value: Any, keep: int = _KEEP_BYTES) -> Any:
    """Return a value, or its size and SHA-256 in place of one that is too large for a record.

    Of an object with more than `keep` bytes, what is large in it is replaced first.
    """
    packed = orjson.dumps(value)
    if len(packed) <= keep:
        return value
    if isinstance(value, dict) and keep >= _LEAST_BYTES:
        shorter = {name: shorten(each, keep // 4) for name, each in value.items()}
        if len(orjson.dumps(shorter)) <= keep:
            return shorter
    return {"bytes": len(packed), "sha256": hash_line(packed)}


def hash_line(line: bytes) -> str:
    """Return the hash of a line, as the next one holds it."""
    return hashlib.sha256(line).hexdigest()


@dataclass(frozen=True)
class ChainHead:
    """A record's sequence and hash: who keeps it elsewhere knows all records up to it."""

    sequence: int
    digest: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the head that `str` wrote; raises ValueError for anything else."""
        found = _HEAD.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is no head: it is such as 1795886073123:<64 digits>")
        return cls(int(found[1]), found[2])

    def __str__(self) -> str:
        return f"{self.sequence}:{self.digest}"

    def is_before(self, sequence: int, previous: str) -> bool:
        """Return True if a line with this sequence and hash of its predecessor follows the head."""
        return self.sequence < sequence and self.digest == previous


class ChainBroken(MillstreamError):
    """A record is not the one that was written, or records are missing before it.

    `sequence` is that of the first record at which this shows; 0 if it cannot be read.
    """

    def __init__(self, sequence: int, reason: str) -> None:
        super().__init__(f"the audit log is broken at record {sequence or '?'}: {reason}")
        self.sequence = sequence


class ChainVerifier:
    """Checks lines in order: each holds the hash of the one before it.

    `known` are heads that were kept elsewhere: those of lines, or the one that the first line
    follows where those before it are archived. `after` is the head that the first line must follow,
    by default none. `head` is that of the last line that was added, and `records` is their
    number.
    """

    def __init__(self, known: Iterable[ChainHead] = (), after: ChainHead | None = None) -> None:
        self._known = {head.sequence: head for head in known}
        self.head = after
        self.records = 0

    def add(self, line: bytes) -> None:
        """Take the next line; raises `ChainBroken` if it cannot follow those before it."""
        sequence, previous = _read_link(line)
        if self.head is None:
            self.head = self._pop_archived(sequence, previous)
        expected = self.head.digest if self.head else GENESIS
        if self.head and sequence <= self.head.sequence:
            raise ChainBroken(sequence, f"it comes after record {self.head.sequence}")
        if previous != expected:
            before = f"record {self.head.sequence}" if self.head else "the beginning of all"
            raise ChainBroken(
                sequence,
                f"it follows a record with the hash {previous}, and not {before} with {expected}: "
                "a record was changed, removed or put in",
            )
        self.head = ChainHead(sequence, hash_line(line))
        self.records += 1
        if known := self._known.pop(sequence, None):
            self.expect_head(known)

    def _pop_archived(self, sequence: int, previous: str) -> ChainHead | None:
        """Return the known head that the first line follows; None if it follows none."""
        found = [head for head in self._known.values() if head.is_before(sequence, previous)]
        return self._known.pop(found[0].sequence) if found else None

    def expect_head(self, known: ChainHead) -> None:
        """Raise `ChainBroken` if the last line is not the one with this head."""
        if self.head != known:
            found = self.head or "none"
            raise ChainBroken(known.sequence, f"the head here is {found}, and not {known}")

    def finish(self) -> None:
        """Raise `ChainBroken` if a known head was not among the lines."""
        for sequence in sorted(self._known):
            last = self.head.sequence if self.head else 0
            raise ChainBroken(sequence, f"it is missing; the last record is {last}")


def _read_link(line: bytes) -> tuple[int, str]:
    try:
        found = orjson.loads(line)
        return int(found["sequence"]), str(found["previous"])
    except (ValueError, KeyError, TypeError):
        raise ChainBroken(0, f"a line is no record: {line[:80]!r}") from None

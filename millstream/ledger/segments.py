"""Segments: closed files of ledger records in a directory, one JSON object a line.

A segment's name has the first and the last sequence of the ledger that it covers and the SHA-256 of
its bytes, and it gets this name by one rename when it is complete. So the directory itself is the
cursor of the export: whatever is not in a closed segment is read from the ledger again, and a
process that is killed at any moment leaves nothing half.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import orjson

from streams.errors import MillstreamError

OPEN_NAME = "ledger.open"  # the segment that is being written
_DIGITS = 20
_NAME = re.compile(r"ledger-(\d{20})-(\d{20})-([0-9a-f]{64})\.jsonl\Z")
_READ_BYTES = 2**20
Line = dict[str, Any]


class SegmentsDamaged(MillstreamError):
    """A segment is missing or is not what it was when it was closed; the message says which."""


@dataclass(frozen=True, order=True)
class Segment:
    """A closed segment: the ledger's records from sequence `first` to `last`, both included."""

    first: int
    last: int
    digest: str
    path: Path

    def read(self, after: int = 0) -> Iterator[Line]:
        """Yield its records with a sequence above `after`, in order, a line at a time."""
        with self.path.open("rb") as file:
            for line in file:
                record = orjson.loads(line)
                if record["seq"] > after:
                    yield record

    def verify(self) -> None:
        """Raise `SegmentsDamaged` if its bytes are not those that were written."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
        if digest.hexdigest() != self.digest:
            raise SegmentsDamaged(
                f"{self.path.name} has the SHA-256 {digest.hexdigest()}: somebody has changed it; "
                "restore it, or export into an empty directory while the ledger still has it"
            )


def list_segments(directory: Path) -> list[Segment]:
    """Return the closed segments of a directory in order.

    Raises `SegmentsDamaged` if one is missing in between.
    """
    found = sorted(_parse(path) for path in directory.iterdir() if _NAME.match(path.name))
    for before, after in pairwise(found):
        if after.first != before.last + 1:
            raise SegmentsDamaged(
                f"between {before.path.name} and {after.path.name} a segment is missing: the first "
                f"ends at {before.last}, and the next begins at {after.first}"
            )
    return found


def _parse(path: Path) -> Segment:
    match = _NAME.match(path.name)
    assert match
    return Segment(int(match[1]), int(match[2]), match[3], path)


class SegmentWriter:
    """Writes one segment: `add` lines, then `close`, which gives the file its name.

    `first` is the first sequence that it covers. An open segment of an earlier process is
    overwritten.
    """

    def __init__(self, directory: Path, first: int) -> None:
        self._directory, self._first = directory, first
        self._path = directory / OPEN_NAME
        self._file: IO[bytes] = self._path.open("wb")
        self._digest = hashlib.sha256()
        self.size = 0  # bytes

    def add(self, lines: Iterable[Line]) -> None:
        """Append lines; nothing of them counts before `close`."""
        packed = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
        self._file.write(packed)
        self._digest.update(packed)
        self.size += len(packed)

    def abandon(self) -> None:
        """Close the file without completing the segment; nothing of it counts."""
        self._file.close()

    def close(self, last: int) -> Segment:
        """Complete the segment, which covers the ledger up to `last`; it is durable afterwards."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = self._digest.hexdigest()
        name = f"ledger-{self._first:0{_DIGITS}}-{last:0{_DIGITS}}-{digest}.jsonl"
        path = self._path.rename(self._directory / name)
        sync_directory(self._directory)
        return Segment(self._first, last, digest, path)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Export directory: takes ledger records in order, and keeps each request once in its segments."""

from collections.abc import Sequence
from pathlib import Path

import structlog

from millstream.ledger.request_ids import INDEX_NAME, ExportedIds
from millstream.ledger.segments import (
    OPEN_NAME,
    Line,
    Segment,
    SegmentsDamaged,
    SegmentWriter,
    list_segments,
)
from millstream.up.file_lock import try_lock
from streams.errors import MillstreamError

log = structlog.get_logger()

_LOCK_NAME = ".export.lock"


class DirectoryInUse(MillstreamError):
    """Another process exports into the same directory."""


class ExportDirectory:
    """A directory of segments, for one process at a time; `close` it at the end.

    `last` is the last sequence of the ledger that closed segments cover, 0 if there are none.
    Raises `DirectoryInUse`, and `SegmentsDamaged` if a segment is missing.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._path, self._lock = path, (path / _LOCK_NAME).open("w")
        if not try_lock(self._lock):
            self._lock.close()
            raise DirectoryInUse(f"another process exports into {path}")
        (path / OPEN_NAME).unlink(missing_ok=True)  # its records are in the ledger still
        try:
            segments = list_segments(path)
        except SegmentsDamaged:
            self._lock.close()
            raise
        self._ids = ExportedIds(path)
        self._ids.catch_up(segments)
        self.last = segments[-1].last if segments else 0
        self._writer: SegmentWriter | None = None
        self._check_index(path)
        self._open_ids: set[str] = set()
        self._open_last = self.last

    def _check_index(self, path: Path) -> None:
        """Raise `SegmentsDamaged` if the index knows of later segments than there are."""
        if (indexed := self._ids.last) > self.last:
            self.close()
            raise SegmentsDamaged(
                f"{path} has segments up to sequence {self.last}, and {INDEX_NAME} those up to "
                f"{indexed}: put the missing ones back; of older ones, the last must stay here"
            )

    def close(self) -> None:
        """Release the directory; what is in an open segment counts as not exported."""
        if self._writer:
            self._writer.abandon()
        self._ids.close()
        self._lock.close()

    @property
    def is_open(self) -> bool:
        """True while a segment is open, which `close_segment` would close."""
        return self._writer is not None

    @property
    def open_bytes(self) -> int:
        """The size of the open segment; 0 without one."""
        return self._writer.size if self._writer else 0

    @property
    def open_last(self) -> int:
        """The last sequence that was added, whether its segment is closed or not."""
        return self._open_last

    def add(self, lines: Sequence[Line], first: int, last: int) -> None:
        """Add the records of the ledger from sequence `first` to `last`; open a segment for them.

        Records of a request that the directory has already are left out.
        """
        if self._writer is None:
            self._writer = SegmentWriter(self._path, first)
        self._writer.add(self._without_repeated(lines))
        self._open_last = last

    def _without_repeated(self, lines: Sequence[Line]) -> list[Line]:
        known = self._ids.find_known([each["request_id"] for each in lines if _is_request(each)])
        kept = list[Line]()
        for line in lines:
            if _is_request(line):
                if (name := line["request_id"]) in known or name in self._open_ids:
                    log.warning("ledger_record_repeated", request_id=name, seq=line["seq"])
                    continue
                self._open_ids.add(name)
            kept.append(line)
        return kept

    def close_segment(self) -> Segment | None:
        """Close the open segment and return it; its records are exported from now on.

        Without an open segment nothing is done, and the result is None.
        """
        if self._writer is None:
            return None
        segment = self._writer.close(self._open_last)
        self._ids.add(segment, self._open_ids)
        self._writer, self.last = None, segment.last
        self._open_ids = set()
        return segment


def _is_request(line: Line) -> bool:
    return bool(line["type"] == "request")

"""Index of all request ids in a directory's segments, by which each is exported once, for ever.

The broker recognises a record that comes twice within minutes; this recognises it after years. The
index is an SQLite file beside the segments, and is made from them: what it lacks, or all of it, is
read from them at the start.
"""

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from millstream.ledger.segments import Segment

INDEX_NAME = "request-ids.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS ids (id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (last INTEGER PRIMARY KEY);
"""


class ExportedIds:
    """The request ids in closed segments, on disk. Not thread-safe; `close` it at the end."""

    def __init__(self, directory: Path) -> None:
        self._database = sqlite3.connect(directory / INDEX_NAME, check_same_thread=False)
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @property
    def last(self) -> int:
        """The last sequence of the ledger that the indexed segments cover; 0 if there are none."""
        (last,) = self._database.execute("SELECT max(last) FROM segments").fetchone()
        return last or 0

    def catch_up(self, segments: Iterable[Segment]) -> None:
        """Add the ids of those segments that the index lacks, as after a kill."""
        indexed = self.last
        for segment in segments:
            if segment.last > indexed:
                self.add(segment, request_ids(segment))

    def add(self, segment: Segment, ids: Iterable[str]) -> None:
        """Add the ids of a segment that has been closed; all or none of them."""
        with self._database:
            self._database.executemany("INSERT OR IGNORE INTO ids VALUES (?)", ((i,) for i in ids))
            self._database.execute("INSERT OR IGNORE INTO segments VALUES (?)", (segment.last,))

    def find_known(self, ids: list[str]) -> set[str]:
        """Return those of `ids` that are in closed segments."""
        query = "SELECT id FROM ids WHERE id IN (SELECT value FROM json_each(?))"
        return {row[0] for row in self._database.execute(query, (json.dumps(ids),))}


def request_ids(segment: Segment) -> Iterable[str]:
    """Yield the request ids in a segment."""
    return (line["request_id"] for line in segment.read() if line["type"] == "request")

"""Token log cache: the writer's own copy of its log, served to readers that missed records. Pure.

To read one log of many that grow side by side, the broker goes through all of their records: 150 ms
for one of 800 logs, in which it stores nothing. The writer of a log has its records in memory.
"""

import sys
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, NamedTuple

from streams import messages

MAX_PAGE_RECORDS = 200


@dataclass(frozen=True)
class RecordsQuery:
    """A reader's question to the worker that writes a token log: records from sequence `seq` on.

    `seq` is the sequence in the stream; `most_bytes` limits the answer roughly. A reader that
    begins (`seq` 1) already has all tokens up to index `after` (-1: none) and needs no records that
    hold only those.
    """

    tenant: str
    request_id: str
    seq: int
    after: int
    most_bytes: int


class RecordPage(NamedTuple):
    """Some records of a token log in order, each as a pair of stream sequence and packed bytes.

    `remaining` is the number of records after the last one of the page.
    """

    records: list[tuple[int, bytes]]
    remaining: int


class TokenLogCache:
    """The writer's in-memory copy of its token log: packed records in order, with sequences."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self._seqs = array("Q")
        self._claim = 0  # place of the last claim

    def add(self, seq: int, record: bytes, is_claim: bool = False) -> None:
        """Append a record that the broker has stored at stream sequence `seq`.

        `seq` must be above those of the earlier records. `is_claim` marks the record with which an
        attempt took over the log.
        """
        if is_claim:
            self._claim = len(self.records)
        self.records.append(record)
        self._seqs.append(seq)

    def drop_before_claim(self) -> None:
        """Delete the records before the last one added with `is_claim`; without one, nothing."""
        del self.records[: self._claim]
        del self._seqs[: self._claim]
        self._claim = 0

    def read_page(self, query: RecordsQuery) -> RecordPage:
        """Return the next records that a reader asks for, at most 200 and about `query.most_bytes`.

        The page is empty only if there are no such records. For a reader that begins, records of
        tokens that the reader already has are skipped; the last claim is then put first if it was
        among them.
        """
        begins = query.seq <= 1
        start = self._find_start(query.after + 1) if begins else bisect_left(self._seqs, query.seq)
        places = [self._claim] if begins and self._claim < start else []
        size = 0
        for place in range(start, min(start + MAX_PAGE_RECORDS, len(self.records))):
            size += len(self.records[place])
            if size > query.most_bytes and len(places) > 1:
                break
            places.append(place)
        end = places[-1] + 1 if places else start
        return RecordPage(
            [(self._seqs[p], self.records[p]) for p in places], len(self.records) - end
        )

    def _find_start(self, token: int) -> int:
        """Return the place of the last record from which a reader that lacks `token` can begin.

        It is a chunk or the first record: vectors are needed from the first one on. Text behind the
        last token is a chunk of no tokens, so that several may have the same index.
        """
        if token <= 0:
            return 0
        places = range(len(self.records))
        at = bisect_left(places, token, key=self._first_token_from)
        begins = (place for place in places[at:] if "index" in self._unpack_record(place))
        begin = next(begins, None)
        if begin is None or self._unpack_record(begin)["index"] > token:
            begin = max(0, at - 1)
        return begin if self.records and "characters" in self._unpack_record(begin) else 0

    def _first_token_from(self, place: int) -> int:
        """Return the index of the first token in the records from `place` on."""
        for later in range(place, len(self.records)):
            if (index := self._unpack_record(later).get("index")) is not None:
                return int(index)
        return sys.maxsize

    def _unpack_record(self, place: int) -> dict[str, Any]:
        return messages.unpack_record(self.records[place])

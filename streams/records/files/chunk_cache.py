"""Chunks of files that were read last, kept in memory. Pure."""

from collections import OrderedDict


class ChunkCache:
    """The chunks used last, by their subjects: at most `max_bytes` of them.

    A chunk never changes, so none is ever out of date; whether its file still exists, its record
    tells.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._chunks = OrderedDict[str, bytes]()

    def find(self, subject: str) -> bytes | None:
        """Return a chunk, which counts as used now; None if it is not kept."""
        if subject in self._chunks:
            self._chunks.move_to_end(subject)
        return self._chunks.get(subject)

    def add(self, subject: str, chunk: bytes) -> None:
        """Keep a chunk in place of those that were used least lately."""
        self._bytes += len(chunk) - len(self._chunks.pop(subject, b""))
        self._chunks[subject] = chunk
        while self._bytes > self._max_bytes:
            _, dropped = self._chunks.popitem(last=False)
            self._bytes -= len(dropped)

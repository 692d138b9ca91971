"""Index of a batch's input: where the line with a given `custom_id` is, in one or two small reads.

A file of ours with an entry for each line, sorted by a hash of its id. Hashes are spread evenly, so
the chunk that must have one is known, or is a neighbour of that.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from streams.records.files.file_records import StoredFile
from streams.records.files.file_store import FileStore

HASH_BYTES = 8
_ENTRY = struct.Struct(f">{HASH_BYTES}sIQI")  # hash, index, offset, bytes with the line's end
CHUNK_BYTES = 1024 * _ENTRY.size


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Place of a line in its file: it begins at `offset`, and the next one at `end`."""

    index: int
    offset: int
    end: int


def hash_id(custom_id: str) -> bytes:
    """Return the hash of an id by which the index is sorted."""
    encoded = custom_id.encode(errors="surrogatepass")
    return hashlib.blake2b(encoded, digest_size=HASH_BYTES).digest()


def iterate_entries(places: Mapping[bytes, LinePlace]) -> Iterator[bytes]:
    """Yield the index's bytes, given the place of each line by the hash of its id."""
    for key in sorted(places):
        place = places[key]
        yield _ENTRY.pack(key, place.index, place.offset, place.end - place.offset)


async def find_place(files: FileStore, index: StoredFile, custom_id: str) -> LinePlace | None:
    """Return where the line with an id is; None if there is none.

    Reads one chunk of `CHUNK_BYTES` (24 KiB), seldom two. Raises `ChunkMissing` or
    `BrokerUnavailable`.
    """
    wanted, chunks = hash_id(custom_id), -(-index.size // CHUNK_BYTES)
    low, high = 0, chunks
    number = int.from_bytes(wanted) * chunks >> 8 * HASH_BYTES
    while low <= number < high:
        start = number * CHUNK_BYTES
        pieces = [piece async for piece in files.read(index, start, start + CHUNK_BYTES)]
        entries = b"".join(pieces)
        if wanted < _hash_at(entries, 0):
            number, high = number - 1, number
        elif wanted > _hash_at(entries, len(entries) // _ENTRY.size - 1):
            number, low = number + 1, number + 1
        else:
            return _search(entries, wanted)
    return None


def _search(entries: bytes, wanted: bytes) -> LinePlace | None:
    numbers = range(len(entries) // _ENTRY.size)
    at = bisect_left(numbers, wanted, key=lambda number: _hash_at(entries, number))
    found, index, offset, size = _ENTRY.unpack_from(entries, at * _ENTRY.size)
    return LinePlace(index, offset, offset + size) if found == wanted else None


def _hash_at(entries: bytes, number: int) -> bytes:
    start = number * _ENTRY.size
    return entries[start : start + HASH_BYTES]

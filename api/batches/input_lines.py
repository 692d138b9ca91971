"""The lines of a stored file, read a few chunks at a time."""

from collections.abc import AsyncIterator

from api.batches.batch_line import InputLine
from streams.records.files.file_records import StoredFile
from streams.records.files.file_store import FileStore

MAX_LINE_BYTES = 1_000_000  # as a gateway takes a body
MAX_LINES = 1_000_000  # of any batch; jobs services take fewer


async def iterate_lines(
    files: FileStore, file: StoredFile, index: int = 0, offset: int = 0
) -> AsyncIterator[InputLine]:
    """Yield the lines of a file from the byte `offset` on, where the line `index` begins.

    Raises `ChunkMissing`, or `BrokerUnavailable`.
    """
    rest = bytearray()
    skipped = 0  # bytes of a line that is too long
    begin = offset
    async for piece in files.read(file, offset):
        rest += piece
        start = 0
        while (at := rest.find(b"\n", start)) >= 0:
            end = begin + skipped + at - start + 1
            data = None if skipped else bytes(rest[start:at])
            if data is None or data.strip():
                yield InputLine(index, begin, end, data if _fits(data) else None)
                index += 1
            begin, start, skipped = end, at + 1, 0
        del rest[:start]
        if len(rest) > MAX_LINE_BYTES:
            skipped += len(rest)
            rest.clear()
    if skipped or rest.strip():
        end = begin + skipped + len(rest)
        yield InputLine(index, begin, end, None if skipped else bytes(rest))


def _fits(data: bytes | None) -> bool:
    return data is not None and len(data) <= MAX_LINE_BYTES

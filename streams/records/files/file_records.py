"""Records of files that tenants have stored, as the bucket `files` has them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

from streams import job_subjects, messages
from streams.records.cas.cas_record import CasRecord

CHUNK_BYTES = 512 * 1024
INDEX_PURPOSE = "batch_index"  # of files that are no tenant's to see


class FileState(StrEnum):
    """State of a file; a pending one is still being sent."""

    PENDING = "pending"
    READY = "ready"
    DELETED = "deleted"


@dataclass(frozen=True)
class FilePart:
    """Consecutive bytes of a file that were sent at once, and the size of the chunks they are in.

    All chunks but the last have `chunk_bytes`. `id` is the token of their subjects. A part is
    recorded before its first chunk is stored, so that no chunk is ever without a record; it has no
    bytes then, and `is_whole` is False.
    """

    id: str
    size: int = 0
    chunk_bytes: int = CHUNK_BYTES
    is_whole: bool = False

    @property
    def chunk_count(self) -> int:
        """The number of chunks that hold the part's bytes."""
        return -(-self.size // self.chunk_bytes)


class ChunkRange(NamedTuple):
    """The bytes from `start` to before `end` of one chunk, which is stored on `subject`."""

    subject: str
    start: int
    end: int


@dataclass(frozen=True)
class StoredFile(CasRecord):
    """A file of a tenant: its name, purpose and state, and the parts that hold its bytes.

    `size` is in bytes: as it was announced, and once the file is ready its real one. Times are
    epoch seconds; a file is gone at `expires_at`, a pending one, too, unless it is None.
    `expires_after_seconds` is how long the file stays once it is ready. `unused` are the ids of
    parts that were sent and did not become part of it. `key` is the id of the API key with which it
    came. `ended_at` is when it was deleted. `revision` is the sequence of the
    record in its stream, 0 before it is stored.
    """

    tenant: str
    id: str
    filename: str
    purpose: str
    created_at: int
    size: int
    expires_at: int | None
    expires_after_seconds: int | None = None
    mime_type: str = ""
    state: FileState = FileState.PENDING
    parts: tuple[FilePart, ...] = ()
    unused: tuple[str, ...] = ()
    key: str = ""
    ended_at: int = 0

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the record that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: dict[str, Any] = messages.unpack(data)
        parts = tuple(messages.from_wire(FilePart, part) for part in wire["parts"])
        known = messages.from_wire(cls, wire)
        return replace(
            known,
            parts=parts,
            unused=tuple(known.unused),
            state=FileState(known.state),
            revision=revision,
        )

    def is_gone(self, now: float) -> bool:
        """Return True if the file was deleted, or its time is over."""
        return self.state is FileState.DELETED or (
            self.expires_at is not None and self.expires_at <= now
        )

    def find_part(self, part_id: str) -> FilePart | None:
        """Return the part with this id; None if there is none."""
        return next((part for part in self.parts if part.id == part_id), None)

    def with_part(self, part: FilePart) -> Self:
        """Return the record with a part in place of the one with its id, or as its last one."""
        if self.find_part(part.id) is None:
            return replace(self, parts=(*self.parts, part))
        parts = tuple(part if each.id == part.id else each for each in self.parts)
        return replace(self, parts=parts)

    def with_purpose(self, purpose: str, expires_after_seconds: int | None) -> Self:
        """Return the record of a pending file with its purpose, and how long it stays."""
        return replace(self, purpose=purpose, expires_after_seconds=expires_after_seconds)

    def as_ready(self, parts: tuple[FilePart, ...]) -> Self:
        """Return the record of the file once it is whole and consists of these parts, in order."""
        kept, used = self.expires_after_seconds, {part.id for part in parts}
        return replace(
            self,
            state=FileState.READY,
            size=sum(part.size for part in parts),
            expires_at=None if kept is None else self.created_at + kept,
            parts=parts,
            unused=(*self.unused, *(part.id for part in self.parts if part.id not in used)),
        )

    def chunk_ranges(self, start: int = 0, end: int | None = None) -> Iterator[ChunkRange]:
        """Yield where the bytes from `start` to before `end` lie, in order; `end` None: to the end.

        A position beyond the end counts as the end.
        """
        end = self.size if end is None else min(end, self.size)
        offset = 0  # of the part in the file
        for part in self.parts:
            first, last = max(start, offset) - offset, min(end, offset + part.size) - offset
            while first < last:
                number, within = divmod(first, part.chunk_bytes)
                size = min(part.chunk_bytes - within, last - first)
                subject = job_subjects.file_chunk(self.tenant, part.id, number)
                yield ChunkRange(subject, within, within + size)
                first += size
            offset += part.size

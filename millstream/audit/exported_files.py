"""Files of audit records in a directory: lines as they are stored, named by the chain's head.

    audit-<first sequence>-<last sequence>-<hash of the last line>.jsonl

A file gets this name by a rename when it is complete, and the next one follows its last line; so
the name of the newest file is the head of all, and nothing is lost or twice.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.ledger.segments import sync_directory
from streams.errors import MillstreamError
from streams.records.audit_chain import ChainHead, ChainVerifier

_OPEN_NAME = "audit.open"
_NAME = re.compile(r"audit-(\d{20})-(\d{20})-([0-9a-f]{64})\.jsonl\Z")


class NothingExported(MillstreamError):
    """The directory that is to be verified has no audit records."""


@dataclass(frozen=True, order=True)
class ExportedFile:
    """A complete file: records from sequence `first` to `last`; `hash` is that of the last one."""

    first: int
    last: int
    hash: str
    path: Path

    @property
    def head(self) -> ChainHead:
        """The head of the chain at its end."""
        return ChainHead(self.last, self.hash)

    def read(self) -> Iterator[bytes]:
        """Yield its lines in order."""
        with self.path.open("rb") as file:
            for line in file:
                yield line.removesuffix(b"\n")


def list_files(directory: Path) -> list[ExportedFile]:
    """Return the complete files of a directory in order; none if there is no such directory."""
    if not directory.is_dir():
        return []
    found = ((path, _NAME.match(path.name)) for path in directory.iterdir())
    return sorted(ExportedFile(int(m[1]), int(m[2]), m[3], path) for path, m in found if m)


def verify_files(directory: Path, known: Iterable[ChainHead] = ()) -> ChainVerifier:
    """Check all files of a directory as one chain; raises `ChainBroken` at the first bad record.

    Also if one of the `known` heads is not in it, or a file does not end as its name says. Raises
    `NothingExported` if it has no files.
    """
    files, verifier = list_files(directory), ChainVerifier(known)
    if not files:
        raise NothingExported(
            f"{directory} has no file of `millstream audit export`: name the directory of one"
        )
    for file in files:
        for line in file.read():
            verifier.add(line)
        verifier.expect_head(file.head)
    verifier.finish()
    return verifier


def write_file(directory: Path, lines: Sequence[bytes], first: int, head: ChainHead) -> Path:
    """Write lines, of which there is one at least, into a file; it is durable afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    open_path = directory / _OPEN_NAME
    with open_path.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    path = open_path.rename(
        directory / f"audit-{first:020}-{head.sequence:020}-{head.digest}.jsonl"
    )
    sync_directory(directory)
    return path

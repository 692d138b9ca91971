"""What a worker holds, written down where it outlives the process.

The broker misses a dead worker only when the ack wait has run out. Whoever learns of the death
sooner, the supervisor that has reaped the process or the worker that is started in its place, reads
here what it held and gives it back at once. The journal is a hint: what it misses comes back by the
ack wait, and what is given back in error is tried twice, which the claim on the log fences.

The first line says whose it is; behind it a delivery's reply subject is noted with `+` as it is
taken and with `-` as it is settled. The kernel keeps the file locked for as long as the process
lives. Its modification time is that of the last beat, by a clock that nobody can set: after an ack
wait others have the work.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Self

import structlog

from streams import subjects
from streams.clock import ticks
from streams.connection import Broker
from streams.errors import BrokerUnavailable, MillstreamError
from streams.locking import locked
from streams.pull import Delivery

log = structlog.get_logger()

_MOST_LINES = 10_000  # then it is written anew
_ANSWER_SECONDS = 1.0
_NANOSECONDS = 10**9


class JournalTaken(MillstreamError):
    """Another process keeps its journal there."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another worker keeps its journal in {path}")
        self.path = path


@dataclass(frozen=True)
class Owner:
    """Whose journal it is, and for how long after its last beat the work is still its own."""

    worker: str
    ack_wait_seconds: float


class Journal:
    """One worker's; without a path it is kept nowhere. Begins empty."""

    def __init__(self, path: Path | None, owner: Owner) -> None:
        """Raises `JournalTaken`, or `OSError` if there can be no such file."""
        self._owner = owner
        self._held: set[str] = set()
        self._lines = 0
        self._file = path.open("ab", buffering=0) if path else None
        if self._file and path:
            if not locked(self._file):
                self._file.close()
                raise JournalTaken(path)
            self._rewrite()
            self.beat()

    def close(self) -> None:
        """Nothing is held any more, or whoever reads it gives it back."""
        if self._file:
            self._file.close()
            self._file = None

    def hold(self, delivery: Delivery) -> None:
        """It was taken."""
        self._held.add(delivery.reply)
        self._write(f"+{delivery.reply}\n")

    def let_go(self, delivery: Delivery) -> None:
        """It was settled, or is somebody else's."""
        self._held.discard(delivery.reply)
        self._write(f"-{delivery.reply}\n")

    def beat(self) -> None:
        """What is held is still held."""
        if self._file:
            now = int(ticks() * _NANOSECONDS)
            os.utime(self._file.fileno(), ns=(now, now))

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        self._lines += 1
        try:
            if self._lines > _MOST_LINES:
                self._rewrite()
            else:
                self._file.write(line.encode())
            self.beat()
        except OSError as error:  # a full disk is no reason not to serve
            log.warning("journal_ended", reason=str(error))
            self.close()

    def _rewrite(self) -> None:
        assert self._file
        self._file.truncate(0)
        self._file.write(_packed(self._owner, self._held))
        self._lines = len(self._held)


async def release(broker: Broker, path: Path) -> int:
    """Give back what a worker that has died held; how many deliveries that were.

    Does nothing while the worker lives, when its ack wait is over, and the second time. Raises
    `BrokerUnavailable`; it may then be tried again.
    """
    try:
        with path.open("r+b", buffering=0) as file:
            if not locked(file) or (left := _Left.read(file)) is None:
                return 0
            await _give_back(broker, left)
            file.truncate(0)
    except FileNotFoundError:  # it died before it had one
        return 0
    log.info("work_released", worker=left.owner.worker, deliveries=len(left.held))
    return len(left.held)


@dataclass(frozen=True)
class _Left:
    """What the journal of a dead worker says."""

    owner: Owner
    held: frozenset[str]

    @classmethod
    def read(cls, file: FileIO) -> Self | None:
        """None if there is nothing in it, or others have the work by now."""
        whole = file.read().decode().rpartition("\n")[0]  # no line that was being written
        if not whole:
            return None
        first, *lines = whole.split("\n")
        owner, held = Owner(**json.loads(first)), set[str]()
        for line in lines:
            (held.add if line[:1] == "+" else held.discard)(line[1:])
        age = ticks() - os.fstat(file.fileno()).st_mtime_ns / _NANOSECONDS  # negative after a boot
        return cls(owner, frozenset(held)) if 0 <= age <= owner.ack_wait_seconds else None


async def _give_back(broker: Broker, left: _Left) -> None:
    """First the work, so that it is there when the dispatcher takes back what was placed there."""
    for reply in left.held:
        await broker.publish(reply, b"-NAK")
    await broker.publish(subjects.GONE, left.owner.worker.encode())
    if not await broker.answers(_ANSWER_SECONDS):
        raise BrokerUnavailable("NATS did not confirm what was given back")


def _packed(owner: Owner, held: Iterable[str]) -> bytes:
    lines = [json.dumps(asdict(owner)), *(f"+{reply}" for reply in held), ""]
    return "\n".join(lines).encode()

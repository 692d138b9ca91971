"""What became of a request's attempts: for the next one, and for an operator.

The token log tells who has claimed it, and clients see that. Here a worker notes how its attempt
went if that did not end the request; no client reads it. Who has claimed and noted nothing has died
with its process, or was cut off.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from streams import messages, subjects, topology
from streams.connection import Broker
from streams.subjects import Log
from streams.token_log import Contents

MOST_FAILURES = 3  # attempts that may fail before a request is given up
SILENT = "the worker fell silent"
_MOST_CHARACTERS = 500  # of an error
_NOTE_SECONDS = 2.5  # for a note to be stored; without it a failure counts as silence

# `trial`: it starts alone from here on; `passed`: no longer; the others end an attempt.
Kind = Literal["trial", "passed", "released", "failed", "broke"]


class Fault(StrEnum):
    """What an attempt that did not end its request says about the request."""

    NONE = "none"  # handed on: a drain, a hand-over, another's fault
    SHARED = "shared"  # its engine or its process failed while it ran there beside others
    OWN = "own"  # nothing else can have been the reason


_FAULTS = {"released": Fault.NONE, "failed": Fault.SHARED, "broke": Fault.OWN}


@dataclass(frozen=True)
class Note:
    """What a worker says of one of its attempts; `at` is epoch ms."""

    attempt: int
    worker: str
    kind: Kind
    at: int
    error: str = ""


@dataclass(frozen=True)
class Try:
    """One attempt that did not end its request; `at` (epoch ms) is 0 when it fell silent."""

    attempt: int
    worker: str
    fault: Fault
    error: str = ""
    at: int = 0


@dataclass(frozen=True)
class History:
    """All earlier attempts at a request, the first one first."""

    tries: tuple[Try, ...] = ()

    @property
    def failures(self) -> list[Try]:
        return [each for each in self.tries if each.fault is not Fault.NONE]

    @property
    def is_suspect(self) -> bool:
        """Whether the next failure would be the last: it has to start alone, to be told apart."""
        return len(self.failures) >= MOST_FAILURES - 1

    @property
    def is_guilty(self) -> bool:
        """It has failed often enough, and at last by its own fault for certain."""
        failures = self.failures
        return len(failures) >= MOST_FAILURES and failures[-1].fault is Fault.OWN

    @property
    def may_be_wrong(self) -> bool:
        """It is guilty by a silence: the worker may live, cut off for a moment, and say so late."""
        return self.is_guilty and self.failures[-1].at == 0

    def and_then(self, last: Try) -> "History":
        return History((*self.tries, last))

    def pack(self) -> list[dict[str, Any]]:
        """Plain data, as a dead letter holds it."""
        return [asdict(each) for each in self.tries]


def unpack(packed: Iterable[Mapping[str, Any]]) -> History:
    """What `History.pack` has made."""
    tries = (messages.known(Try, each) for each in packed)
    return History(tuple(Try(**{**vars(each), "fault": Fault(each.fault)}) for each in tries))


def history_of(log: Contents, notes: Sequence[Note]) -> History:
    """The attempts that a log knows of, as the notes explain them."""
    starts = (record for record in log.records if record["type"] == "started")
    return History(tuple(_try(start["attempt"], start["worker"], notes) for start in starts))


def _try(attempt: int, worker: str, notes: Sequence[Note]) -> Try:
    own = [note for note in notes if (note.attempt, note.worker) == (attempt, worker)]
    ends = [note for note in own if note.kind in _FAULTS]
    if ends:
        return Try(attempt, worker, _FAULTS[ends[-1].kind], ends[-1].error, ends[-1].at)
    on_trial = bool(own) and own[-1].kind == "trial"
    return Try(attempt, worker, Fault.OWN if on_trial else Fault.SHARED, SILENT)


async def read(broker: Broker, address: Log, log: Contents) -> History:
    """The history of a request whose log was read. Raises `BrokerUnavailable`."""
    if not log.attempts:
        return History()
    subject = subjects.attempts(address.tenant, address.request_id)
    stored = await broker.read_subject(topology.ATTEMPTS, subject)
    notes = [messages.known(Note, messages.unpack(message.data)) for message in stored]
    return history_of(log, notes)


async def note(broker: Broker, address: Log, said: Note) -> None:
    """Store a note. Raises `BrokerUnavailable` or `StoreRefused`."""
    subject = subjects.attempts(address.tenant, address.request_id)
    await broker.store_retrying(subject, messages.pack(said), {}, _NOTE_SECONDS)


def noted(attempt: int, worker: str, kind: Kind, at: int, error: str = "") -> Note:
    """A note of what was at `at`, in epoch ms."""
    return Note(attempt, worker, kind, at, error[:_MOST_CHARACTERS])

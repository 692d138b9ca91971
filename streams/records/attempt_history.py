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
from streams.broker.connection import Broker
from streams.records.token_log import LogContents
from streams.subjects import LogAddress

MAX_FAILURES = 3  # attempts that may fail before a request is given up
SILENT = "the worker fell silent"
_MOST_CHARACTERS = 500  # of an error
_NOTE_SECONDS = 2.5  # for a note to be stored; without it a failure counts as silence

# `trial`: it starts alone from here on; `passed`: no longer; the others end an attempt.
NoteKind = Literal["trial", "passed", "released", "failed", "broke"]


class FaultScope(StrEnum):
    """What an attempt that did not end its request says about the request."""

    NONE = "none"  # handed on: a drain, a hand-over, another's fault
    SHARED = "shared"  # its engine or its process failed while it ran there beside others
    OWN = "own"  # nothing else can have been the reason


_FAULTS = {"released": FaultScope.NONE, "failed": FaultScope.SHARED, "broke": FaultScope.OWN}


@dataclass(frozen=True)
class AttemptNote:
    """What a worker says of one of its attempts; `at` is epoch ms."""

    attempt: int
    worker: str
    kind: NoteKind
    at: int
    error: str = ""


@dataclass(frozen=True)
class PastAttempt:
    """One attempt that did not end its request; `at` (epoch ms) is 0 when it fell silent."""

    attempt: int
    worker: str
    fault: FaultScope
    error: str = ""
    at: int = 0


@dataclass(frozen=True)
class AttemptHistory:
    """All earlier attempts at a request, the first one first."""

    attempts: tuple[PastAttempt, ...] = ()

    @property
    def failures(self) -> list[PastAttempt]:
        return [each for each in self.attempts if each.fault is not FaultScope.NONE]

    @property
    def is_suspect(self) -> bool:
        """Whether the next failure would be the last: it has to start alone, to be told apart."""
        return len(self.failures) >= MAX_FAILURES - 1

    @property
    def is_poison(self) -> bool:
        """It has failed often enough, and at last by its own fault for certain."""
        failures = self.failures
        return len(failures) >= MAX_FAILURES and failures[-1].fault is FaultScope.OWN

    @property
    def is_poison_unconfirmed(self) -> bool:
        """It is guilty by a silence: the worker may live, cut off for a moment, and say so late."""
        return self.is_poison and self.failures[-1].at == 0

    def with_attempt(self, last: PastAttempt) -> "AttemptHistory":
        return AttemptHistory((*self.attempts, last))

    def pack(self) -> list[dict[str, Any]]:
        """Plain data, as a dead letter holds it."""
        return [asdict(each) for each in self.attempts]


def unpack(packed: Iterable[Mapping[str, Any]]) -> AttemptHistory:
    """What `AttemptHistory.pack` has made."""
    tries = (messages.from_wire(PastAttempt, each) for each in packed)
    return AttemptHistory(
        tuple(PastAttempt(**{**vars(each), "fault": FaultScope(each.fault)}) for each in tries)
    )


def build_history(log: LogContents, notes: Sequence[AttemptNote]) -> AttemptHistory:
    """The attempts that a log knows of, as the notes explain them."""
    starts = (record for record in log.records if record["type"] == "started")
    return AttemptHistory(
        tuple(_past_attempt(start["attempt"], start["worker"], notes) for start in starts)
    )


def _past_attempt(attempt: int, worker: str, notes: Sequence[AttemptNote]) -> PastAttempt:
    own = [note for note in notes if (note.attempt, note.worker) == (attempt, worker)]
    ends = [note for note in own if note.kind in _FAULTS]
    if ends:
        return PastAttempt(attempt, worker, _FAULTS[ends[-1].kind], ends[-1].error, ends[-1].at)
    on_trial = bool(own) and own[-1].kind == "trial"
    return PastAttempt(attempt, worker, FaultScope.OWN if on_trial else FaultScope.SHARED, SILENT)


async def read_history(broker: Broker, address: LogAddress, log: LogContents) -> AttemptHistory:
    """The history of a request whose log was read. Raises `BrokerUnavailable`."""
    if not log.attempts:
        return AttemptHistory()
    subject = subjects.attempts(address.tenant, address.request_id)
    stored = await broker.read_subject(topology.ATTEMPTS, subject)
    notes = [messages.from_wire(AttemptNote, messages.unpack(message.data)) for message in stored]
    return build_history(log, notes)


async def store_note(broker: Broker, address: LogAddress, said: AttemptNote) -> None:
    """Store a note. Raises `BrokerUnavailable` or `StoreRefused`."""
    subject = subjects.attempts(address.tenant, address.request_id)
    await broker.store_retrying(subject, messages.pack(said), {}, _NOTE_SECONDS)


def make_note(attempt: int, worker: str, kind: NoteKind, at: int, error: str = "") -> AttemptNote:
    """A note of what was at `at`, in epoch ms."""
    return AttemptNote(attempt, worker, kind, at, error[:_MOST_CHARACTERS])

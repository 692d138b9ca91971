"""Attempt history: how earlier attempts at a request went, for the next attempt and the operator.

The token log says which workers have claimed it, and clients see that. Here a worker stores a note
of how its attempt went if that did not end the request; no client reads notes. A worker that has
claimed the log without a note has died, or was cut off from the broker.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from streams import messages, subjects, topology
from streams.broker.broker_client import Broker
from streams.records.log_contents import LogContents
from streams.subjects import LogAddress

MAX_FAILURES = 3  # attempts that may fail before a request is given up
SILENT = "the worker fell silent"
_MAX_ERROR_CHARACTERS = 500
_NOTE_SECONDS = 2.5  # timeout for storing a note; without one, the attempt counts as silent

# `trial`: from here on the request runs alone; `passed`: no longer; the others end an attempt.
NoteKind = Literal["trial", "passed", "released", "failed", "broke"]


class FaultScope(StrEnum):
    """Degree to which a failed attempt is blamed on its request: none, possible or certain."""

    NONE = "none"  # not at all: a drain, a hand-over, the fault of another request
    SHARED = "shared"  # perhaps: the engine or process failed while other requests ran in it, too
    OWN = "own"  # for certain: nothing else can have been the reason


_REASONS = {
    FaultScope.NONE: "released",
    FaultScope.SHARED: "failed",
    FaultScope.OWN: "broke",
}
_FAULTS = {"released": FaultScope.NONE, "failed": FaultScope.SHARED, "broke": FaultScope.OWN}


@dataclass(frozen=True)
class AttemptNote:
    """A worker's stored note on one of its attempts (its tries at serving one request).

    `kind` is `trial` (from here on the request runs alone on the worker), `passed` (no longer
    alone), or the way in which the attempt ended without ending the request. `at` is epoch
    milliseconds; `error` is the reason, if any.
    """

    attempt: int
    worker: str
    kind: NoteKind
    at: int
    error: str = ""


@dataclass(frozen=True)
class PastAttempt:
    """One worker's earlier try at a request, which did not end the request.

    `fault` says how far the request is to blame, and `error` is the reason. `at` is when the
    attempt ended, in epoch milliseconds; 0 if the worker fell silent without noting the end.
    """

    attempt: int
    worker: str
    fault: FaultScope
    error: str = ""
    at: int = 0

    @property
    def reason(self) -> str:
        """The reason of its end: `released`, `failed` (with others), `broke` or `silent`."""
        if self.fault is not FaultScope.NONE and not self.at:
            return "silent"
        return _REASONS[self.fault]


@dataclass(frozen=True)
class AttemptHistory:
    """All earlier attempts at one request, oldest first, and what follows from them."""

    attempts: tuple[PastAttempt, ...] = ()

    @property
    def failures(self) -> list[PastAttempt]:
        """Failed attempts for which the request is perhaps or certainly to blame, oldest first."""
        return [each for each in self.attempts if each.fault is not FaultScope.NONE]

    @property
    def is_suspect(self) -> bool:
        """True if one more failure would be the last allowed, or `MAX_FAILURES` are reached.

        The next attempt must then run alone on its worker, so that a failure is certainly the
        request's own fault.
        """
        return len(self.failures) >= MAX_FAILURES - 1

    @property
    def is_poison(self) -> bool:
        """True if the request must not be tried again because it has caused too many failures.

        That is the case after `MAX_FAILURES` failures, if the last was certainly the request's own
        fault.
        """
        failures = self.failures
        return len(failures) >= MAX_FAILURES and failures[-1].fault is FaultScope.OWN

    @property
    def is_poison_unconfirmed(self) -> bool:
        """True if the request is poison (`is_poison`) only because the last worker fell silent.

        That worker may still be alive, cut off from the broker for a moment, and store its note
        late.
        """
        return self.is_poison and self.failures[-1].at == 0

    def with_attempt(self, last: PastAttempt) -> "AttemptHistory":
        """Return a copy of this history with the attempt `last` appended."""
        return AttemptHistory((*self.attempts, last))

    def pack(self) -> list[dict[str, Any]]:
        """Return the attempts as plain dicts, oldest first; a dead letter stores them as JSON."""
        return [asdict(each) for each in self.attempts]

    def summarize(self) -> list[dict[str, Any]]:
        """Return the attempts as a ledger record has them: without the texts of errors."""
        return [
            {"attempt": each.attempt, "worker": each.worker, "reason": each.reason, "at": each.at}
            for each in self.attempts
        ]


def unpack(packed: Iterable[Mapping[str, Any]]) -> AttemptHistory:
    """Return the history whose attempts `AttemptHistory.pack` returned.

    Unknown keys are ignored. Raises TypeError if a key is missing, ValueError for an unknown fault.
    """
    attempts = (messages.from_wire(PastAttempt, each) for each in packed)
    return AttemptHistory(
        tuple(PastAttempt(**{**vars(each), "fault": FaultScope(each.fault)}) for each in attempts)
    )


def build_history(log: LogContents, notes: Sequence[AttemptNote]) -> AttemptHistory:
    """Return one past attempt for each `started` record of a token log.

    Its fault is taken from the notes. An attempt without a note of its end counts as one whose
    worker fell silent: its fault is `OWN` if by its last note the request ran alone, else `SHARED`.
    """
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
    """Read the workers' notes on a request from the broker and return the request's history.

    `log` is the content of the request's token log; if no attempt has claimed it, the history is
    empty and the broker is not asked. Raises `BrokerUnavailable` if the broker does not answer.
    """
    if not log.attempts:
        return AttemptHistory()
    subject = subjects.attempts(address.tenant, address.request_id)
    stored = await broker.read_subject(topology.ATTEMPTS, subject)
    notes = [messages.from_wire(AttemptNote, messages.unpack(message.data)) for message in stored]
    return build_history(log, notes)


async def store_note(broker: Broker, address: LogAddress, note: AttemptNote) -> None:
    """Store a note on an attempt and wait until the broker has it.

    Retries for 2.5 s while the broker does not answer, then raises `BrokerUnavailable`. Raises
    `StoreRefused` if the broker refuses the note.
    """
    subject = subjects.attempts(address.tenant, address.request_id)
    await broker.store_retrying(subject, messages.pack(note), {}, _NOTE_SECONDS)


def make_note(attempt: int, worker: str, kind: NoteKind, at: int, error: str = "") -> AttemptNote:
    """Return a note with `error` cut to 500 characters; `at` is epoch milliseconds."""
    return AttemptNote(attempt, worker, kind, at, error[:_MAX_ERROR_CHARACTERS])

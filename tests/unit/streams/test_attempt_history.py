"""What the records of earlier attempts say about a request."""

import pytest

from streams import messages
from streams.records import attempt_history
from streams.records.attempt_history import AttemptNote, FaultScope, NoteKind, build_history
from streams.records.log_contents import LogContents


def told(*attempts: list[NoteKind]) -> attempt_history.AttemptHistory:
    """The history of attempts by one worker, each with what was noted of it."""
    numbered = list(enumerate(attempts, 1))
    records = [messages.started_record("m", "1", number, "w") for number, _ in numbered]
    notes = [AttemptNote(number, "w", kind, at=1) for number, kinds in numbered for kind in kinds]
    return build_history(LogContents(records), notes)


@pytest.mark.parametrize(
    ("noted", "fault"),
    [
        ([], FaultScope.SHARED),
        (["trial"], FaultScope.OWN),
        (["trial", "passed"], FaultScope.SHARED),
        (["trial", "released"], FaultScope.NONE),
        (["released"], FaultScope.NONE),
        (["failed"], FaultScope.SHARED),
        (["trial", "passed", "failed"], FaultScope.SHARED),
        (["broke"], FaultScope.OWN),
    ],
)
def test_what_was_noted_tells_whose_fault_it_was(noted: list[NoteKind], fault: FaultScope) -> None:
    """Silence is a death; on trial nobody else can have been the reason."""
    assert told(noted).attempts[0].fault is fault


@pytest.mark.parametrize(
    ("noted", "reason"),
    [
        ([], "silent"),
        (["trial"], "silent"),
        (["released"], "released"),
        (["failed"], "failed"),
        (["broke"], "broke"),
    ],
)
def test_a_ledger_record_has_a_word_for_each_attempt(noted: list[NoteKind], reason: str) -> None:
    """The text of an error may have anything in it, and goes to whoever reads the bills."""
    at = 0 if reason == "silent" else 1
    assert told(noted).summarize() == [{"attempt": 1, "worker": "w", "reason": reason, "at": at}]


def test_another_workers_note_of_the_same_attempt_says_nothing() -> None:
    """A broker that lost its logs counts attempts from one again."""
    log = LogContents([messages.started_record("m", "1", 1, "w")])
    assert (
        build_history(log, [AttemptNote(1, "other", "released", 1)]).attempts[0].fault
        is FaultScope.SHARED
    )


def test_sharing_a_batch_with_failures_makes_a_suspect_and_never_a_culprit() -> None:
    """However often it was there."""
    for times in range(10):
        failed: list[NoteKind] = ["failed"]
        found = told(*[failed] * times)
        assert found.is_suspect == (times >= attempt_history.MAX_FAILURES - 1)
        assert not found.is_poison


def test_a_request_is_guilty_by_its_third_failure_if_that_is_its_own() -> None:
    """Hand-overs in between change nothing."""
    assert not told(["failed"], ["trial"]).is_poison
    assert told(["failed"], [], ["trial"]).is_poison
    assert told(["failed"], [], ["trial"], ["released"]).is_poison
    assert not told(["failed"], [], ["trial", "passed"]).is_poison


def test_a_verdict_by_silence_alone_may_be_wrong() -> None:
    """Who was cut off for a moment is taken for dead, and takes it back by a late note."""
    assert told(["failed"], [], ["trial"]).is_poison_unconfirmed
    assert not told(["failed"], [], ["trial", "released"]).is_poison
    assert not told(["failed"], [], ["broke"]).is_poison_unconfirmed
    assert not told(["failed"], []).is_poison_unconfirmed


def test_a_history_survives_its_letter() -> None:
    """An operator reads it weeks later."""
    found = told(["failed"], ["released"], ["trial"])
    assert attempt_history.unpack(found.pack()) == found

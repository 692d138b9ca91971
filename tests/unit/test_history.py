"""What the records of earlier attempts say about a request."""

import pytest

from streams import history, messages
from streams.history import Fault, Kind, Note, history_of
from streams.token_log import Contents


def told(*attempts: list[Kind]) -> history.History:
    """The history of attempts by one worker, each with what was noted of it."""
    numbered = list(enumerate(attempts, 1))
    records = [messages.started("m", "1", number, "w") for number, _ in numbered]
    notes = [Note(number, "w", kind, at=1) for number, kinds in numbered for kind in kinds]
    return history_of(Contents(records), notes)


@pytest.mark.parametrize(
    ("noted", "fault"),
    [
        ([], Fault.SHARED),
        (["trial"], Fault.OWN),
        (["trial", "passed"], Fault.SHARED),
        (["trial", "released"], Fault.NONE),
        (["released"], Fault.NONE),
        (["failed"], Fault.SHARED),
        (["trial", "passed", "failed"], Fault.SHARED),
        (["broke"], Fault.OWN),
    ],
)
def test_what_was_noted_tells_whose_fault_it_was(noted: list[Kind], fault: Fault) -> None:
    """Silence is a death; on trial nobody else can have been the reason."""
    assert told(noted).tries[0].fault is fault


def test_another_workers_note_of_the_same_attempt_says_nothing() -> None:
    """A broker that lost its logs counts attempts from one again."""
    log = Contents([messages.started("m", "1", 1, "w")])
    assert history_of(log, [Note(1, "other", "released", 1)]).tries[0].fault is Fault.SHARED


def test_sharing_a_batch_with_failures_makes_a_suspect_and_never_a_culprit() -> None:
    """However often it was there."""
    for times in range(10):
        failed: list[Kind] = ["failed"]
        found = told(*[failed] * times)
        assert found.is_suspect == (times >= history.MOST_FAILURES - 1)
        assert not found.is_guilty


def test_a_request_is_guilty_by_its_third_failure_if_that_is_its_own() -> None:
    """Hand-overs in between change nothing."""
    assert not told(["failed"], ["trial"]).is_guilty
    assert told(["failed"], [], ["trial"]).is_guilty
    assert told(["failed"], [], ["trial"], ["released"]).is_guilty
    assert not told(["failed"], [], ["trial", "passed"]).is_guilty


def test_a_verdict_by_silence_alone_may_be_wrong() -> None:
    """Who was cut off for a moment is taken for dead, and takes it back by a late note."""
    assert told(["failed"], [], ["trial"]).may_be_wrong
    assert not told(["failed"], [], ["trial", "released"]).is_guilty
    assert not told(["failed"], [], ["broke"]).may_be_wrong
    assert not told(["failed"], []).may_be_wrong


def test_a_history_survives_its_letter() -> None:
    """An operator reads it weeks later."""
    found = told(["failed"], ["released"], ["trial"])
    assert history.unpack(found.pack()) == found

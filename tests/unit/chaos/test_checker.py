"""The checker finds what is wrong: a checker that finds nothing would pass everything."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos import history
from tests.chaos.checker import RULES, check
from tests.chaos.history import (
    Accepted,
    AccessProbed,
    AccessViolated,
    BatchEnded,
    BatchTries,
    Cancelled,
    Chunk,
    Disconnected,
    Ended,
    Event,
    FaultInjected,
    FootprintChange,
    LedgerEntry,
    QueueDepth,
    Refused,
    RunStarted,
    Stored,
    StoredLog,
    Submitted,
    UnexpectedFrame,
    UnknownOnResume,
)
from tests.chaos.indexed_history import IndexedHistory
from tests.chaos.measurements import measure
from tests.unit.chaos.sample_history import (
    GOOD_HISTORY,
    Change,
    first_event,
    with_event_changed,
    with_event_repeated,
    with_events_swapped,
    without_event,
)

FIRST = first_event(Chunk, "a")
SECOND = next(event for event in GOOD_HISTORY if isinstance(event, Chunk) and event.index == 1)
LAST = next(event for event in GOOD_HISTORY if isinstance(event, Chunk) and event.index == 3)
LOG = first_event(StoredLog, "id-a")

DEAF = [
    FaultInjected(1.0, "deafen", "client-0"),
    FaultInjected(18.0, "deafen", "client-0", undone=True),
]
BRIEFLY = [DEAF[0], replace(DEAF[1], at=9.0)]
CUT = Disconnected(18.0, "client-0", 1006)

PRODUCED, BATCH_END = first_event(StoredLog, "id-p"), first_event(BatchEnded, "batch")
LINE_BILL = first_event(LedgerEntry, "id-l0-again")
FAILED_TRY = first_event(LedgerEntry, "id-l0")  # nobody is told how far it came


def _unheard(events: list[Event], **log: Any) -> list[Event]:
    """A producer has heard nothing of its request, whose log is as told."""
    heard = [e for e in events if "p" in vars(e).values() and not isinstance(e, Submitted | Stored)]
    told = with_event_changed(PRODUCED, **log)(events)
    return [event for event in told if event not in heard]


NEVER = Submitted(4.0, "c", "acme", ["seven "], "client-0")
BROKEN: list[tuple[str, Change]] = [
    ("one_terminal", without_event(first_event(Ended, "a"))),
    ("one_terminal", with_event_repeated(first_event(Ended, "a"))),
    ("one_terminal", with_event_changed(LOG, terminals=["length", "length"])),
    ("one_terminal", with_event_changed(LOG, terminals=[])),
    ("one_request", with_event_changed(first_event(Accepted, "a"), request_id="id-c")),
    ("not_failed", with_event_changed(first_event(Ended, "a"), outcome="log_lost")),
    ("gap_free", without_event(SECOND)),
    ("gap_free", with_event_repeated(SECOND)),
    ("gap_free", with_events_swapped(SECOND, LAST)),
    ("stored_gap_free", with_event_changed(LOG, chunks=LOG.chunks[:1] + LOG.chunks[2:])),
    ("stored_gap_free", with_event_changed(LOG, chunks=LOG.chunks + LOG.chunks[2:])),
    ("undisturbed", with_event_changed(SECOND, text="two free ")),
    ("undisturbed", without_event(LAST)),
    ("undisturbed", without_event(first_event(Cancelled, "b"))),
    ("stored_first", without_event(LOG)),
    ("stored_first", with_event_changed(LOG, chunks=LOG.chunks[:2])),
    ("stored_first", with_event_changed(LOG, terminals=["cancelled"])),
    ("billed_once", without_event(first_event(LedgerEntry, "id-a"))),
    ("billed_once", with_event_repeated(first_event(LedgerEntry, "id-a"))),
    ("billed_once", with_event_changed(first_event(LedgerEntry, "id-a"), completion_tokens=5)),
    ("billed_once", with_event_changed(first_event(LedgerEntry, "id-b"), outcome="length")),
    ("billed_once", with_event_changed(first_event(Ended, "a"), completion_tokens=5)),
    ("unheard_settled", lambda events: [*events, StoredLog("id-c", "acme", [], ["length"], 1)]),
    ("unheard_settled", lambda events: [*events, *[LedgerEntry("id-c", "acme", 1, "length")] * 2]),
    ("tenants_apart", with_event_changed(LOG, tenant="other")),
    ("tenants_apart", with_event_changed(first_event(LedgerEntry, "id-a"), tenant="other")),
    ("tenants_apart", with_event_changed(first_event(AccessProbed, "id-a"), answer="accepted")),
    ("within_rights", lambda events: [*events, AccessViolated("nats-0", "Publish Violation")]),
    ("refused_clearly", with_event_changed(first_event(Refused, "b"), retry_after_ms=None)),
    ("refused_clearly", with_event_changed(first_event(Refused, "b"), code="internal_error")),
    ("accepted_in_the_end", lambda events: [*events, NEVER]),
    (
        "accepted_in_the_end",
        lambda events: [*events, NEVER, replace(first_event(Refused, "b"), request="c")],
    ),
    ("produced_once", lambda events: [e for e in events if not isinstance(e, Stored)]),
    ("produced_once", lambda events: [*events, replace(PRODUCED, request_id="id-p2")]),
    ("produced_once", without_event(PRODUCED)),
    ("produced_once", lambda events: _unheard(events, terminals=["attempts_exhausted"])),
    ("produced_once", lambda events: _unheard(events, chunks=[(0, 1, "nine ")])),
    ("lines_answered_once", without_event(BATCH_END)),
    ("lines_answered_once", with_event_changed(BATCH_END, status="expired")),
    ("lines_answered_once", with_event_changed(BATCH_END, answered=["l1"])),
    ("lines_answered_once", with_event_changed(BATCH_END, texts=["ten "])),
    ("lines_answered_once", with_event_changed(BATCH_END, failed=["l0"])),
    ("lines_answered_once", with_event_changed(BATCH_END, failed=[], codes=[])),
    ("lines_answered_once", with_event_changed(BATCH_END, codes=["internal_error"])),
    (
        "lines_answered_once",
        with_event_changed(
            BATCH_END, answered=["l1", "l0"], texts=["ten ", "nine "], failed=[], codes=[]
        ),
    ),
    ("lines_billed_once", without_event(LINE_BILL)),
    ("lines_billed_once", with_event_changed(LINE_BILL, completion_tokens=2)),
    ("lines_billed_once", with_event_changed(LINE_BILL, tenant="other")),
    (
        "lines_billed_once",
        with_event_changed(first_event(LedgerEntry, "id-l0"), outcome="length"),
    ),
    ("known_when_resumed", lambda events: [*events, UnknownOnResume(4.0, "a")]),
    ("nothing_astray", lambda events: [*events, UnexpectedFrame(4.0, "client-0", "a", "chunk")]),
    ("nothing_astray", lambda events: [*events, UnexpectedFrame(4.0, "client-1", "a", "done")]),
    (
        "nothing_astray",
        lambda events: [*events, UnexpectedFrame(4.0, "client-0", "", "internal_error")],
    ),
    ("looked_at", without_event(first_event(AccessProbed, "id-a"))),
    ("looked_at", without_event(first_event(QueueDepth, "WORK"))),
    ("looked_at", without_event(first_event(BatchTries, "batch"))),
    ("nothing_left", with_event_changed(first_event(QueueDepth, "WORK"), messages=1)),
    (
        "back_to_baseline",
        with_event_changed(first_event(FootprintChange, "gateway-0"), rss_after=2**30),
    ),
    (
        "back_to_baseline",
        with_event_changed(first_event(FootprintChange, "gateway-0"), descriptors_after=60),
    ),
    ("only_the_deaf_are_cut", lambda events: [*events, *DEAF]),
    ("only_the_deaf_are_cut", lambda events: [*events, *BRIEFLY, CUT]),
    ("only_the_deaf_are_cut", lambda events: [*events, *DEAF, CUT, replace(CUT, client="c")]),
    ("only_the_deaf_are_cut", lambda events: [*events, *DEAF, replace(CUT, code=1011)]),
]


def test_a_good_history_breaks_no_rule() -> None:
    """A worker died, a socket dropped, a request was refused and cancelled: all as promised."""
    assert check(GOOD_HISTORY) == []


@pytest.mark.parametrize(("rule", "change"), BROKEN)
def test_each_rule_finds_what_breaks_it(rule: str, change: Change) -> None:
    """By its own name: the verdict is read by people."""
    assert rule in {violation.rule for violation in check(change(GOOD_HISTORY))}


def test_no_rule_is_untried() -> None:
    """A rule without a history that breaks it may never find anything."""
    assert {rule.__name__ for rule in RULES} == {rule for rule, _ in BROKEN}


def test_a_fault_may_excuse_a_failure_and_nothing_else() -> None:
    """A lost log may end a request: with an error, once, and with what was stored billed."""
    failed = with_event_changed(first_event(Ended, "a"), outcome="log_lost")(GOOD_HISTORY)
    failed = with_event_changed(LOG, terminals=["log_lost"])(failed)
    failed = with_event_changed(first_event(LedgerEntry, "id-a"), outcome="log_lost")(failed)
    excused = with_event_changed(
        first_event(RunStarted, "made"), excused=["log_lost", "work_lost"]
    )(failed)
    assert [violation.rule for violation in check(failed)] == ["not_failed"]
    assert check(excused) == []


def test_brokers_that_forget_may_have_no_logs_left() -> None:
    """The ledger is on disk: it says the same all the same."""
    forgetful = with_event_changed(first_event(RunStarted, "made"), forgets=True)(GOOD_HISTORY)
    assert check(without_event(LOG)(forgetful)) == []
    assert (
        check(without_event(first_event(LedgerEntry, "id-a"))(without_event(LOG)(forgetful))) != []
    )
    assert check(with_event_changed(LOG, chunks=LOG.chunks[2:])(forgetful)) == []
    assert check(with_event_changed(LOG, chunks=[])(forgetful)) == []
    assert check(with_event_changed(LOG, chunks=LOG.chunks[:2])(forgetful)) != []
    again = with_event_changed(
        first_event(StoredLog, "id-b"), chunks=[(0, 2, "five six ")], terminals=["length"]
    )
    assert check(again(forgetful)) == []
    assert check([*without_event(LOG)(forgetful), UnknownOnResume(1.5, "a")]) == []


def test_nobody_ends_what_was_wiped() -> None:
    """Its gateway tells a client so, and a producer hears nothing more; others have their end."""
    wipe = [FaultInjected(0.4, "wipe", "nats-0"), FaultInjected(0.7, "wipe", "nats-0", undone=True)]
    wiped = with_event_changed(
        first_event(RunStarted, "made"), wipes=True, forgets=True, excused=["log_lost"]
    )(GOOD_HISTORY)
    lost = with_event_changed(first_event(Ended, "a"), outcome="log_lost")(wiped)
    lost = without_event(first_event(LedgerEntry, "id-a"))(lost)
    lost = with_event_changed(LOG, terminals=[])(lost)
    unanswered = without_event(first_event(Ended, "p"))(lost)
    unanswered = with_event_changed(PRODUCED, terminals=[])(unanswered)
    told = with_event_changed(BATCH_END, codes=["log_lost"])(unanswered)
    assert check([*told, *wipe]) == []
    assert {violation.rule for violation in check(told)} == {"one_terminal"}
    endless = without_event(first_event(Ended, "b"))([*told, *wipe])
    assert {violation.rule for violation in check(endless)} == {"one_terminal"}


def test_a_producer_may_miss_all_replies() -> None:
    """They are sent once, to who listens; its request has run all the same, as its log says."""
    assert check(_unheard(GOOD_HISTORY)) == []


def test_a_batch_may_be_lost_with_the_store_alone() -> None:
    """A wiped store may know nothing of it, or may not bill its lines."""
    wiped = with_event_changed(first_event(RunStarted, "made"), wipes=True)(GOOD_HISTORY)
    gone = with_event_changed(BATCH_END, status="not found", answered=[], texts=[], failed=[])
    unknown = without_event(first_event(BatchTries, "batch"))
    assert check(without_event(LINE_BILL)(gone(unknown(wiped)))) == []
    assert check(gone(GOOD_HISTORY)) != []


def test_a_cancel_may_cross_with_the_end() -> None:
    """What it cancels is over by then, and its client is told so."""
    assert check([*GOOD_HISTORY, UnexpectedFrame(1.3, "client-1", "b", "request_not_found")]) == []


LATER: list[Event] = [
    Submitted(2000.0, "c", "acme", ["six "], "client-0"),
    Accepted(2000.1, "c", "id-c"),
    Chunk(2000.2, "c", 0, 1, "six "),
    Ended(2000.3, "c", "length", 1),
    StoredLog("id-c", "acme", [(0, 1, "six ")], ["length"], 1),
    LedgerEntry("id-c", "acme", 1, "length"),
]


def test_logs_are_dropped_with_their_age_and_nothing_else_is() -> None:
    """Brokers keep them for as long as a client may come back; a run may last longer."""
    whole = [*GOOD_HISTORY, *LATER]
    assert check(without_event(LOG)(whole)) == []
    assert check(with_event_changed(LOG, chunks=LOG.chunks[1:])(whole)) == []
    assert [v.rule for v in check(without_event(LATER[-2])(whole))] == ["stored_first"]
    assert check(without_event(first_event(LedgerEntry, "id-a"))(whole)) != []


def test_who_reads_nothing_is_cut_and_who_reads_again_in_time_is_not() -> None:
    """Both are as promised."""
    assert check([*GOOD_HISTORY, *DEAF, CUT]) == []
    assert check([*GOOD_HISTORY, *BRIEFLY]) == []


@given(st.sampled_from(GOOD_HISTORY[1:]), st.data())
def test_no_change_of_what_counts_goes_unseen(event: Event, data: st.DataObject) -> None:
    """Every number and name that a client, a log or a bill has said is held against another one."""
    counting = {"index", "count", "completion_tokens", "text", "outcome", "tenant", "request_id"}
    names = sorted(counting & {field.name for field in fields(event)})
    if not names or isinstance(event, AccessProbed | Submitted) or event == FAILED_TRY:
        return
    name = data.draw(st.sampled_from(names))
    value = getattr(event, name)
    other = value + 1 if isinstance(value, int) else f"{value}x"
    assert check(with_event_changed(event, **{name: other})(GOOD_HISTORY)) != []


def test_a_history_is_the_same_after_it_was_written() -> None:
    """What is checked later is what was recorded."""
    assert list(history.load(history.dump(GOOD_HISTORY).splitlines())) == GOOD_HISTORY


def test_figures_are_what_clients_noticed() -> None:
    """The gap is the longest pause of a stream that was hit; a refusal makes acceptance late."""
    found = measure(IndexedHistory(GOOD_HISTORY))
    assert (found.streams, found.right, found.refusals, found.moved) == (3, 3, 1, 1)
    assert found.struck == 1
    assert found.gap_max == 2.5
    assert found.accept_max == 0.6

"""Exact counts of ends, refusals and kept goals over a sliding window."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.signals.ledger_window import LedgerWindow, ModelPriority, judge_goal
from streams.messages import LedgerRecord, RefusalCounts

STANDARD = ModelPriority("mock", "standard")
WINDOW = 10
ACCEPTED = 1_000_000


def ended(**fields: Any) -> LedgerRecord:
    """A request with a goal of 500 ms, whose first token came after 400 ms."""
    record = LedgerRecord(
        request_id="r",
        tenant="acme",
        model="mock",
        version="1",
        outcome="stop",
        prompt_tokens=7,
        completion_tokens=3,
        attempts=1,
        worker="w",
        accepted=ACCEPTED,
        finished=ACCEPTED + 900,
        first=ACCEPTED + 400,
        priority="standard",
        goal_ms=500,
        worker_ms=700,
    )
    return replace(record, **fields)


def refused(number: int, code: str = "overloaded", priority: str = "standard") -> RefusalCounts:
    return RefusalCounts("g", "acme", "mock", 0, 0, [(code, "1", priority, number)])


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, "attained"),
        ({"first": ACCEPTED + 500}, "attained"),
        ({"first": ACCEPTED + 501}, "missed"),
        ({"goal_ms": None}, None),
        ({"first": 0, "outcome": "deadline_exceeded"}, "missed"),
        ({"first": 0, "outcome": "engine_failed", "finished": ACCEPTED + 1}, "missed"),
        ({"first": 0, "outcome": "cancelled", "finished": ACCEPTED + 500}, "left"),
        ({"first": 0, "outcome": "cancelled", "finished": ACCEPTED + 501}, "missed"),
        ({"outcome": "cancelled"}, "attained"),
    ],
)
def test_a_goal_is_kept_or_not(fields: dict[str, Any], verdict: str | None) -> None:
    """By the first token; who leaves before the goal is due says nothing of it."""
    assert judge_goal(ended(**fields)) == verdict


def test_what_ended_and_what_was_refused_is_counted_by_model_and_priority() -> None:
    """A model's priorities, and its refusals by their reason."""
    window = LedgerWindow(WINDOW)
    window.add_record(ended(), 100.1)
    window.add_record(ended(outcome="length", attempts=2), 100.2)
    window.add_record(ended(priority="batch", goal_ms=None), 101.0)
    window.add_refusals(refused(5), 101.0)
    window.add_refusals(refused(2, "rate_limit_exceeded"), 101.5)
    counts = window.counts_of(STANDARD)
    assert counts.ended == {"stop": 1, "length": 1}
    assert counts.refused == {"overloaded": 5, "rate_limit_exceeded": 2}
    assert counts.measured["prompt_tokens"] == 14
    assert counts.measured["attained"] == 2
    assert window.counts_of(ModelPriority("mock", "batch")).ended == {"stop": 1}


def test_only_refusals_for_want_of_capacity_are_demand() -> None:
    """More workers change nothing about a quota, or about a wrong request."""
    window = LedgerWindow(WINDOW)
    for number, code in enumerate(("no_workers", "tenant_backlog", "rate_limit_exceeded"), 1):
        window.add_refusals(refused(number, code), 100)
    assert window.counts_of(STANDARD).refused_for_capacity == 3


def test_the_time_in_the_queue_is_what_was_not_spent_at_the_worker() -> None:
    """Of one attempt alone: an earlier one's time was no waiting."""
    window = LedgerWindow(WINDOW)
    window.add_record(ended(), 100)
    window.add_record(ended(attempts=3, worker_ms=1), 100)
    assert window.counts_of(STANDARD).mean_queue_seconds == pytest.approx(0.2)
    assert window.counts_of(ModelPriority("mock", "batch")).mean_queue_seconds is None


def test_the_window_ends_after_its_seconds() -> None:
    """The second in which something was stored counts as a whole."""
    window = LedgerWindow(WINDOW)
    window.add_record(ended(), 100.9)
    window.expire(110.99)
    assert window.counts_of(STANDARD).ended == {"stop": 1}
    window.expire(111.0)
    assert list(window.seen()) == []


events = st.lists(
    st.tuples(
        st.integers(0, 3),  # seconds since the one before
        st.sampled_from(["stop", "length", "refused"]),
        st.sampled_from(["standard", "batch"]),
    ),
    max_size=60,
)


@given(events, st.integers(0, WINDOW * 2))
def test_whoever_begins_to_read_later_counts_the_same(
    found: list[tuple[int, str, str]], later: int
) -> None:
    """A new leader reads the ledger of the window alone; an old one has added and taken off."""
    old, stored, now = LedgerWindow(WINDOW), list[tuple[int, str, str]](), 100
    for pause, what, priority in found:
        now += pause
        stored.append((now, what, priority))
        add(old, now, what, priority)
        old.expire(now)
    now += later
    old.expire(now)
    new, expected = LedgerWindow(WINDOW), Counter[tuple[str, str]]()
    for at, what, priority in stored:
        if at >= now - WINDOW:
            add(new, at, what, priority)
            expected[what, priority] += 1
    assert set(old.seen()) == set(new.seen())
    assert [old.counts_of(key) for key in new.seen()] == [new.counts_of(key) for key in new.seen()]
    for (what, priority), count in expected.items():
        counts = new.counts_of(ModelPriority("mock", priority))
        assert (counts.refused["overloaded"] if what == "refused" else counts.ended[what]) == count


def add(window: LedgerWindow, now: int, what: str, priority: str) -> None:
    if what == "refused":
        window.add_refusals(refused(1, priority=priority), now)
    else:
        window.add_record(ended(outcome=what, priority=priority), now)

"""A good history made by hand, and ways to change it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.chaos.history import (
    Accepted,
    AccessProbed,
    BatchEnded,
    BatchSubmitted,
    BatchTries,
    Cancelled,
    Chunk,
    Ended,
    Event,
    FaultInjected,
    FootprintChange,
    LedgerEntry,
    QueueDepth,
    Refused,
    RunStarted,
    Started,
    Stored,
    StoredLog,
    Submitted,
)

Change = Callable[[list[Event]], list[Event]]
WORDS = ["one ", "two ", "three ", "four "]

# `a` of acme moves to another worker and is resumed; `b` of other is refused once and cancelled;
# `p` is published twice; of the batch one line is answered at its second try, and one has failed.
GOOD_HISTORY: list[Event] = [
    RunStarted("made", 1, ["work_lost"]),
    BatchSubmitted(0.0, "batch", "acme", {"l0": ["nine "], "l1": ["ten "]}),
    Submitted(0.0, "a", "acme", WORDS, "client-0"),
    Accepted(0.1, "a", "id-a"),
    Started(0.2, "a", 1),
    Chunk(0.3, "a", 0, 1, "one "),
    Submitted(0.3, "b", "other", ["five ", "six "], "client-1"),
    Refused(0.4, "b", "broker_unavailable", 500),
    FaultInjected(0.5, "kill", "worker-0"),
    Submitted(0.5, "p", "acme", ["eight "], "producer-0", "route-p"),
    Stored(0.5, "p"),
    Stored(0.6, "p"),
    Accepted(0.6, "p", "id-p"),
    Chunk(0.6, "p", 0, 1, "eight "),
    Chunk(0.6, "a", 1, 2, "two three "),
    Accepted(0.9, "a", "id-a"),
    Accepted(0.9, "b", "id-b"),
    Chunk(1.0, "b", 0, 1, "five "),
    Cancelled(1.1, "b"),
    Ended(1.2, "b", "cancelled", 1),
    Started(3.0, "a", 2),
    Chunk(3.1, "a", 3, 1, "four "),
    Ended(3.1, "a", "length", 4),
    Ended(3.3, "p", "length", 1),
    BatchEnded(3.4, "batch", "completed", ["l0"], ["nine "], ["l1"], ["work_lost"]),
    AccessProbed("other", "id-a", "request_not_found"),
    StoredLog(
        "id-a", "acme", [(0, 1, "one "), (1, 2, "two three "), (3, 1, "four ")], ["length"], 2
    ),
    StoredLog("id-b", "other", [(0, 1, "five ")], ["cancelled"], 1),
    StoredLog("id-p", "acme", [(0, 1, "eight ")], ["length"], 1, "route-p"),
    LedgerEntry("id-p", "acme", 1, "length"),
    LedgerEntry("id-l0", "acme", 0, "log_lost"),
    LedgerEntry("id-l0-again", "acme", 1, "length"),
    BatchTries("batch", [["id-l0", "id-l0-again"], ["id-l1"]]),
    LedgerEntry("id-a", "acme", 4, "length"),
    LedgerEntry("id-b", "other", 1, "cancelled"),
    QueueDepth("REQUESTS", 0),
    QueueDepth("WORK", 0),
    QueueDepth("INGRESS_acme", 0),
    FootprintChange("gateway-0", 90 * 2**20, 95 * 2**20, 30, 30),
]


def without_event(event: Event) -> Change:
    """The history without an event."""
    return lambda events: [each for each in events if each != event]


def with_event_repeated(event: Event) -> Change:
    """The history with an event repeated at once."""
    return lambda events: [copy for each in events for copy in [each] * (1 + (each == event))]


def with_event_changed(event: Event, **fields: Any) -> Change:
    """The history with an event that says something else."""
    other = replace(event, **fields)
    return lambda events: [other if each == event else each for each in events]


def with_events_swapped(one: Event, other: Event) -> Change:
    """The history with two events in each other's place."""
    places = {id(one): other, id(other): one}
    return lambda events: [places.get(id(each), each) for each in events]


def first_event(kind: type[Event], who: str) -> Any:
    """The first event of a kind that is about a request, by its name or its id."""
    return next(
        event for event in GOOD_HISTORY if type(event) is kind and who in vars(event).values()
    )

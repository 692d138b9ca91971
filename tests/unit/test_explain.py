"""Why a request waits, as data and in words."""

import json

import pytest

from dispatcher import explain
from dispatcher.books import Books
from dispatcher.lines import Queued
from millstream.sentences import about_request, about_tenant
from streams.messages import Beat
from streams.subjects import Priority
from tests.unit import waiting


def queued(number: int, tenant: str, priority: Priority = Priority.STANDARD) -> Queued:
    return waiting.queued(number, tenant, priority, accepted=1000, deadline=61_000)


def beat(sequences: int = 0, tokens: int = 0, version: str = "1", draining: bool = False) -> Beat:
    return Beat("w", "mock", version, sequences, tokens, 4, 0, 4, 400, 0, 0.0, draining=draining)


@pytest.fixture
def books() -> Books:
    made = Books("mock")
    made.queue.set_weight("acme", 2.0)
    for number in range(6):
        made.queue.push(queued(number, "other" if number % 2 else "acme"), 1.0)
    made.queue.push(queued(6, "other", Priority.INTERACTIVE), 1.0)
    made.queue.push(queued(7, "other", Priority.BATCH), 1.0)
    made.fleet.beat(beat(), 1.0)
    made.tick(1.0)
    return made


def test_a_waiting_request_knows_what_is_ahead_of_it(books: Books) -> None:
    """Its tenant's earlier ones, what others are served until then, and what is urgent."""
    facts = explain.of_request(books, "r4", "1", now=9.0)
    assert facts
    json.dumps(facts)
    assert facts["state"] == "queued"
    assert (facts["ahead_of_its_tenant"], facts["ahead"]) == (2, 2 + 1 + 1)
    assert (facts["waited_seconds"], facts["deadline_in_seconds"]) == (8.0, 52.0)
    assert facts["reason"] == "behind_others"
    text = about_request(facts)
    assert "Request r4 of tenant acme has waited 8.0 s for mock (standard)." in text
    assert "2 requests of the same tenant are ahead of it, 4 of all tenants" in text
    assert "1 of 1 workers are full" in text


def test_a_request_that_is_dispatched_says_since_when(books: Books) -> None:
    """And whether a worker has pulled it."""
    item = books.queue.get("r6")
    assert item
    books.take(item, "1", 2.0)
    books.sent("r6", 40, duplicate=False)
    facts = explain.of_request(books, "r6", None, now=5.0)
    assert facts
    assert (facts["state"], facts["dispatched_seconds_ago"]) == ("in_flight", 3.0)
    assert "no worker has pulled it yet" in about_request(facts)
    books.fleet.left({40})
    facts = explain.of_request(books, "r6", None, now=5.0)
    assert facts
    assert "a worker has it" in about_request(facts)
    running = facts | {"attempts": 2, "worker": "w", "tokens": 7}
    assert "on worker w (version 1), attempt 2; 7 tokens so far" in about_request(running)


def test_nobody_knows_a_stranger(books: Books) -> None:
    """It may have ended, or be another model's."""
    assert explain.of_request(books, "r99", None, now=5.0) is None


@pytest.mark.parametrize(
    ("beats", "reason"),
    [
        ([], "no_workers"),
        ([beat(version="2")], "no_worker_of_version"),
        ([beat(1, 400, draining=True)], "draining"),
        ([beat(0, 400)], "no_free_sequences"),
        ([beat(1, 99)], "no_free_tokens"),
        ([beat(1, 400)], "kept_for_others"),
    ],
)
def test_what_is_next_waits_for_a_reason(beats: list[Beat], reason: str) -> None:
    """The first that holds; each has its words."""
    books = Books("mock")
    for each in beats:
        books.fleet.beat(each, 1.0)
    books.queue.push(queued(0, "acme"), 1.0)
    facts = explain.of_request(books, "r0", "1", now=2.0)
    assert facts
    assert facts["reason"] == reason
    assert "It is next; " in about_request(facts)


def test_a_tenant_learns_what_it_has_used_of_its_share(books: Books) -> None:
    """By weight: acme's 2 of 3 parts, of which it has used a half."""
    for number, tenant in ((10, "acme"), (11, "other")):
        item = queued(number, tenant)
        books.queue.push(item, 1.0)
        books.take(item, "1", 1.0)
        books.sent(item.request_id, number, duplicate=False)
        books.settle(item.request_id, 300, 1.0)
    facts = explain.of_tenant(books, "acme")
    assert facts["times_its_share"] == pytest.approx(0.5 / (2 / 3), abs=0.01)
    assert (facts["weight"], facts["queued"], facts["in_flight"]) == (2.0, {"standard": 3}, 0)
    text = about_tenant({"tenant": "acme", "models": [facts]})
    assert "It has used 0.8x its share in the last minute (weight 2, counter" in text
    assert about_tenant({"tenant": "acme", "models": []}) == "No dispatcher answers."


def test_a_request_that_has_ended_tells_its_outcome() -> None:
    """From its log, or from the ledger when that is gone."""
    log = {
        "request_id": "r",
        "state": "finished",
        "tenant": "acme",
        "worker": "w",
        "attempts": 1,
        "outcome": "deadline_exceeded",
        "message": "the deadline has passed",
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
    assert about_request(log).splitlines() == [
        "Request r of tenant acme has ended (deadline_exceeded) on worker w, after 1 attempt(s).",
        "The deadline has passed.",
        "It took 5 prompt tokens and 2 generated.",
    ]
    ledger = {**log, "message": "", "worker": "", "prompt_tokens": 5, "completion_tokens": 2}
    del ledger["usage"]
    assert "on no worker" in about_request(ledger)
    assert "is not known" in about_request({"request_id": "r", "state": "unknown"})

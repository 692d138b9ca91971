"""Why a request waits, as data and in words."""

import json

import pytest

from dispatcher import explain
from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.tenant_queues import QueuedRequest
from millstream.admin.explanations import explain_request, explain_tenant
from streams.messages import Heartbeat
from streams.subjects import Priority
from tests.unit.dispatcher import queued_requests


def queued(number: int, tenant: str, priority: Priority = Priority.STANDARD) -> QueuedRequest:
    return queued_requests.queued_request(number, tenant, priority, accepted=1000, deadline=61_000)


def beat(
    sequences: int = 0, tokens: int = 0, version: str = "1", draining: bool = False
) -> Heartbeat:
    return Heartbeat(
        "w", "mock", version, sequences, tokens, 4, 0, 4, 400, 0, 0.0, draining=draining
    )


@pytest.fixture
def books() -> ModelState:
    made = ModelState("mock")
    made.queue.set_weight("acme", 2.0)
    for number in range(6):
        made.queue.enqueue(queued(number, "other" if number % 2 else "acme"), 1.0)
    made.queue.enqueue(queued(6, "other", Priority.INTERACTIVE), 1.0)
    made.queue.enqueue(queued(7, "other", Priority.BATCH), 1.0)
    made.fleet.apply_heartbeat(beat(), 1.0)
    made.tick(1.0)
    return made


def test_a_waiting_request_knows_what_is_ahead_of_it(books: ModelState) -> None:
    """Its tenant's earlier ones, what others are served until then, and what is urgent."""
    facts = explain.explain_request(books, "r4", "1", now=9.0)
    assert facts
    json.dumps(facts)
    assert facts["state"] == "queued"
    assert (facts["ahead_of_its_tenant"], facts["ahead"]) == (2, 2 + 1 + 1)
    assert (facts["waited_seconds"], facts["deadline_in_seconds"]) == (8.0, 52.0)
    assert facts["reason"] == "behind_others"
    text = explain_request(facts)
    assert "Request r4 of tenant acme has waited 8.0 s for mock (standard)." in text
    assert "2 requests of the same tenant are ahead of it, 4 of all tenants" in text
    assert "1 of 1 workers are full" in text


def test_a_request_that_is_dispatched_says_since_when(books: ModelState) -> None:
    """And whether a worker has pulled it."""
    item = books.queue.get("r6")
    assert item
    books.reserve(item, "1", 2.0)
    books.mark_published("r6", 40, duplicate=False)
    facts = explain.explain_request(books, "r6", None, now=5.0)
    assert facts
    assert (facts["state"], facts["dispatched_seconds_ago"]) == ("in_flight", 3.0)
    assert "no worker has pulled it yet" in explain_request(facts)
    books.fleet.discard({40})
    facts = explain.explain_request(books, "r6", None, now=5.0)
    assert facts
    assert "a worker has it" in explain_request(facts)
    running = facts | {"attempts": 2, "worker": "w", "tokens": 7}
    assert "on worker w (version 1), attempt 2; 7 tokens so far" in explain_request(running)


def test_nobody_knows_a_stranger(books: ModelState) -> None:
    """It may have ended, or be another model's."""
    assert explain.explain_request(books, "r99", None, now=5.0) is None


@pytest.mark.parametrize(
    ("beats", "reason"),
    [
        ([], "no_workers"),
        ([beat(version="2")], "no_worker_of_version"),
        ([beat(1, 400, draining=True)], "draining"),
        ([beat(0, 400)], "no_free_sequences"),
        ([beat(1, 99)], "no_free_tokens"),
        ([beat(1, 400)], "being_sent"),
    ],
)
def test_what_is_next_waits_for_a_reason(beats: list[Heartbeat], reason: str) -> None:
    """The first that holds; each has its words."""
    books = ModelState("mock")
    for each in beats:
        books.fleet.apply_heartbeat(each, 1.0)
    books.queue.enqueue(queued(0, "acme"), 1.0)
    facts = explain.explain_request(books, "r0", "1", now=2.0)
    assert facts
    assert facts["reason"] == reason
    assert "It is next; " in explain_request(facts)


def test_a_tenant_learns_what_it_has_used_of_its_share(books: ModelState) -> None:
    """By weight: acme's 2 of 3 parts, of which it has used a half."""
    for number, tenant in ((10, "acme"), (11, "other")):
        item = queued(number, tenant)
        books.queue.enqueue(item, 1.0)
        books.reserve(item, "1", 1.0)
        books.mark_published(item.request_id, number, duplicate=False)
        books.settle(item.request_id, 300, 1.0)
    facts = explain.explain_tenant(books, "acme")
    assert facts["times_its_share"] == pytest.approx(0.5 / (2 / 3), abs=0.01)
    assert (facts["weight"], facts["queued"], facts["in_flight"]) == (2.0, {"standard": 3}, 0)
    text = explain_tenant({"tenant": "acme", "models": [facts]})
    assert "It has used 0.8x its share in the last minute (weight 2, counter" in text
    assert explain_tenant({"tenant": "acme", "models": []}) == "No dispatcher answers."


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
        "timing_ms": {"queue": 1.25, "total": 1234.5},
    }
    assert explain_request(log).splitlines() == [
        "Request r of tenant acme has ended (deadline_exceeded) on worker w, after 1 attempt(s).",
        "The deadline has passed.",
        "It took 5 prompt tokens and 2 generated.",
        "Its times: queue 1.2 ms, total 1,234.5 ms.",
    ]
    ledger = {**log, "message": "", "worker": "", "prompt_tokens": 5, "completion_tokens": 2}
    del ledger["usage"]
    assert "on no worker" in explain_request(ledger)
    assert "is not known" in explain_request({"request_id": "r", "state": "unknown"})

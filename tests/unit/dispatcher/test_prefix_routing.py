"""Where a request goes: to who holds what it needs, when that costs nobody anything. Pure."""

from dataclasses import replace
from typing import Any

import pytest

from dispatcher.dispatching.model_state import PLACED_BEFORE, ModelState
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.workers.fleet import PREFETCH_PER_WORKER, STALE_HEARTBEAT_SECONDS, Fleet
from dispatcher.workers.placed_requests import PULL_TIMEOUT_SECONDS, StrandedWork
from dispatcher.workers.prefix_routing import (
    AVOID_SECONDS,
    Placement,
    PlacementRequest,
    PrefixRouter,
)
from streams import prefix_hashes
from streams.headers import Envelope
from streams.messages import Heartbeat
from streams.subjects import ANY, PoolKey, Priority

STANDARD = Priority.STANDARD
KV, PLACES = 100_000, 4
PROMPT = [11, 12, 13, 14, 15, 16, 17]  # marks at 64 … 512 tokens
WISH = PlacementRequest("1", STANDARD, 600, PROMPT)


def beat(worker: str, *held: int, free: int = PLACES, tokens: int = KV, **more: Any) -> Heartbeat:
    known = Heartbeat(worker, "m", "1", free, tokens, PLACES - free, 0, PLACES, KV, 0, 0.0)
    return replace(known, holds=prefix_hashes.pack(held), holds_only=True, **more)


def cell(*beats: Heartbeat) -> PrefixRouter:
    fleet = Fleet()
    affinity = PrefixRouter(fleet)
    for each in beats:
        fleet.apply_heartbeat(each, 0.0)
        affinity.apply_heartbeat(each)
    return affinity


def test_the_longest_prefix_wins() -> None:
    """What is there already need not be computed."""
    affinity = cell(beat("a", *PROMPT[:2]), beat("b", *PROMPT[:5]), beat("c"))
    assert affinity.choose_worker(WISH, 0.0) == Placement("b", "prefix")


def test_what_nobody_holds_goes_to_any() -> None:
    """Whoever has room first takes it, so new prompts spread."""
    assert cell(beat("a", 99), beat("b")).choose_worker(WISH, 0.0) == Placement(ANY, "unknown")


def test_what_is_held_of_another_version_is_of_no_use() -> None:
    """Where a worker serves both, the beats of one would drop what it has of the other."""
    affinity = cell(beat("a", *PROMPT), beat("a", 99, version="2"), beat("b"))
    assert affinity.choose_worker(WISH._replace(version="2"), 0.0).worker == ANY
    assert affinity.choose_worker(WISH, 0.0) == Placement("a", "prefix")


def test_who_serves_a_version_no_more_still_holds_what_it_has_of_others() -> None:
    """A roll-out ends at a worker; its beats for the rest go on, and tell only what is new."""
    books = ModelState("m")
    books.apply_heartbeat(beat("a", 99, version="2"), 0.0)
    books.apply_heartbeat(beat("a", *PROMPT), STALE_HEARTBEAT_SECONDS)
    books.tick(STALE_HEARTBEAT_SECONDS)
    assert books.prefix_router.get_index("2").count_hashes("a") == 0
    assert books.prefix_router.choose_worker(WISH, STALE_HEARTBEAT_SECONDS).why == "everywhere"


def test_what_is_large_goes_to_the_worker_with_the_most_room() -> None:
    """Any worker takes what it has a little room for, and a large request would wait there."""
    affinity = cell(beat("a", tokens=KV // 4), beat("b", tokens=KV // 2))
    large = PlacementRequest("1", STANDARD, KV // 3)
    assert affinity.choose_worker(large, 0.0) == Placement("b", "room")
    affinity.avoid("b", 0.0)
    assert affinity.choose_worker(large, 0.0) == Placement(ANY, "unknown")


def test_what_all_hold_goes_to_any() -> None:
    """A common start prefers nobody."""
    affinity = cell(beat("a", *PROMPT[:1]), beat("b", *PROMPT[:1]))
    assert affinity.choose_worker(WISH, 0.0) == Placement(ANY, "everywhere")


def test_who_is_full_is_not_waited_for_while_others_have_room() -> None:
    """A prefix is worth less than a place."""
    affinity = cell(beat("a", *PROMPT, free=0), beat("b"))
    assert affinity.choose_worker(WISH, 0.0) == Placement(ANY, "full")


def test_who_is_full_may_have_as_many_waiting_as_any_where_all_are() -> None:
    """Work waits in any case; it may as well wait where its prefix is, but not in a long line."""
    books = ModelState("m")
    for each in (beat("a", *PROMPT, free=0), beat("b", free=0)):
        books.apply_heartbeat(each, 0.0)
    went = [send(books, number).why for number in range(1, PREFETCH_PER_WORKER + 2)]
    assert went == ["prefix"] * PREFETCH_PER_WORKER + ["full"]


def test_who_has_more_to_do_than_the_prefix_saves_is_passed_over() -> None:
    """A start that is in fashion is computed a second time rather than served by one worker."""
    near = beat("a", *PROMPT, free=2, tokens=KV - 900)
    far = beat("a", *PROMPT, free=2, tokens=KV - 2000)
    assert cell(near, beat("b")).choose_worker(WISH, 0.0) == Placement("a", "prefix")
    assert cell(far, beat("b")).choose_worker(WISH, 0.0) == Placement(ANY, "busy")


def test_of_two_holders_the_one_with_less_to_do_is_chosen() -> None:
    """Least expected finish, where what is left to compute is the same."""
    affinity = cell(beat("a", *PROMPT, tokens=KV - 400), beat("b", *PROMPT), beat("c"))
    assert affinity.choose_worker(WISH, 0.0).worker == "b"


def test_who_has_loaded_the_adapter_is_preferred() -> None:
    """Another would have to load it first."""
    affinity = cell(beat("a"), beat("b", prefix_hashes.hash_adapter("pirate")))
    wish = PlacementRequest("1", STANDARD, 600, PROMPT, adapter="pirate")
    assert affinity.choose_worker(wish, 0.0) == Placement("b", "adapter")


@pytest.mark.parametrize("change", [{"draining": True}, {"version": "2"}])
def test_who_takes_no_work_of_the_version_is_not_chosen(change: dict[str, Any]) -> None:
    """It would only lie there."""
    affinity = cell(beat("a", *PROMPT, **change), beat("b"), beat("c"))
    assert affinity.choose_worker(WISH, 0.0).worker == ANY


def test_the_next_of_a_burst_follows_the_first() -> None:
    """Beats tell of what is held only when it has been computed."""
    affinity = cell(beat("a", *PROMPT[:3]), beat("b"))
    affinity.choose_worker(WISH, 0.0)
    longer = PlacementRequest("1", STANDARD, 600, [1, 2, 3, *PROMPT[3:]])
    assert affinity.choose_worker(longer, 0.0) == Placement("a", "prefix")


def test_who_did_not_pull_is_left_alone_for_a_while() -> None:
    """Each request that is placed in vain loses the time of waiting for it."""
    affinity = cell(beat("a", *PROMPT), beat("b"))
    affinity.avoid("a", 0.0)
    assert affinity.choose_worker(WISH, 0.0) == Placement(ANY, "slow")
    assert affinity.choose_worker(WISH, AVOID_SECONDS).worker == "a"


# In a leader's books


def books_of(*beats: Heartbeat) -> ModelState:
    books = ModelState("m")
    for each in beats:
        books.apply_heartbeat(each, 0.0)
    return books


def send(books: ModelState, number: int) -> Placement:
    """A request is taken, placed, and stored as message `number`."""
    name = f"r{number}"
    item = QueuedRequest(name, "acme", STANDARD, 550, 600, 0, 10**12, "r", "", number, "")
    books.queue.enqueue(item, 0.0)
    books.reserve(item, "1", 0.0)
    placed = books.place(name, PROMPT, "")
    books.mark_published(name, number, duplicate=False)
    return placed


def test_what_was_placed_takes_room_until_its_worker_has_pulled_it() -> None:
    """Credit that was used is not there for the next."""
    books = books_of(beat("a", *PROMPT, free=1), beat("b", free=0))
    assert [send(books, n).worker for n in (1, 2, 3, 4)] == ["a", "a", "a", ANY]
    books.apply_heartbeat(beat("a", *PROMPT, free=1, pulled_own=2), 0.0)
    assert send(books, 5).worker == "a"


def test_a_beat_may_be_faster_than_the_brokers_answer() -> None:
    """The worker has pulled it before its leader knows that it was stored."""
    books = books_of(beat("a", *PROMPT, pulled_own=1), beat("b"))
    send(books, 1)
    assert not books.fleet.pending_sequences


def test_what_is_not_pulled_in_time_is_taken_back() -> None:
    """Its worker has no room after all, or stands still."""
    books = books_of(beat("a", *PROMPT), beat("b"))
    send(books, 1)
    assert not books.find_stranded(PULL_TIMEOUT_SECONDS)
    assert books.find_stranded(PULL_TIMEOUT_SECONDS + 0.1) == [
        StrandedWork("a", "1", 1, "not_pulled")
    ]
    assert send(books, 2) == Placement(ANY, "slow")


def test_all_is_taken_back_from_a_worker_that_drains_or_is_silent() -> None:
    """What it has pulled, too, though the broker gives that out only after the ack wait."""
    books = books_of(beat("a", *PROMPT), beat("b"))
    send(books, 1)
    books.apply_heartbeat(beat("a", *PROMPT, pulled_own=1), 0.0)
    assert not books.find_stranded(60.0)
    books.apply_heartbeat(beat("a", pulled_own=1, draining=True), 0.0)
    assert books.find_stranded(0.0) == [StrandedWork("a", "1", 1, "draining")]
    books.tick(60.0)
    assert books.find_stranded(0.0) == [StrandedWork("a", "1", 1, "silent")]


def test_what_was_taken_back_waits_for_any_worker() -> None:
    """Its room counts once, wherever it lies, and it ends like any other."""
    books = books_of(beat("a", *PROMPT), beat("b"))
    send(books, 1)
    books.mark_requeued("r1", 1, 2)
    assert books.fleet.pending_sequences == {2}
    assert not books.find_stranded(60.0)
    books.settle_missing("r1", 1, 0.0)  # what the broker said before
    assert "r1" in books.in_flight
    books.apply_heartbeat(beat("b", pulled={STANDARD: 2}), 0.0)
    books.settle("r1", 600, 0.0)
    assert not books.in_flight
    assert books.fleet.free_capacity(STANDARD).sequences == 2 * PLACES


def test_what_is_taken_back_before_the_broker_has_confirmed_it_counts_once() -> None:
    """It lay there without an answer, and a worker that does not pull gave it away."""
    books = books_of(beat("a", *PROMPT), beat("b"))
    books.queue.enqueue(
        item := QueuedRequest("r1", "acme", STANDARD, 550, 600, 0, 10**12, "r", "", 1, ""), 0
    )
    books.reserve(item, "1", 0.0)
    assert books.place("r1", PROMPT, "").worker == "a"
    books.mark_requeued("r1", 1, 2)
    assert books.place("r1", PROMPT, "") == Placement(ANY, PLACED_BEFORE)
    books.mark_published("r1", 1, duplicate=True)
    books.release("r1")
    books.settle_missing("r1", 1, 0.0)
    assert books.in_flight["r1"].seq == 2
    assert books.fleet.pending_sequences == {2}
    standing = books.fleet.worker_capacity("1", "a", STANDARD)
    assert standing
    assert standing.free_sequences == PLACES


def test_a_new_leader_takes_back_what_an_earlier_one_has_placed() -> None:
    """Of workers that died in between nobody has heard since."""
    books = ModelState("m")
    envelope = Envelope("r1", "acme", "r", 600, 550, 10**12, 0, dispatched=1000)
    books.adopt(envelope, PoolKey("m", "1", STANDARD), 7, "gone")
    assert books.find_stranded(1.0) == [StrandedWork("gone", "1", 1, "silent")]


def test_the_brokers_account_of_a_place_is_believed() -> None:
    """A duplicate lies where an earlier leader has put it."""
    books = books_of(beat("a", *PROMPT), beat("b"))
    send(books, 1)
    books.correct_placement("r1", 1, ANY)
    assert not books.find_stranded(60.0)
    books.correct_placement("r1", 1, "gone")
    assert books.find_stranded(60.0) == [StrandedWork("gone", "1", 1, "silent")]

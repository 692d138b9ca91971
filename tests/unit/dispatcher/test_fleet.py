"""Credit: never more work than the workers have room for, and a little to keep them busy."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from dispatcher.workers.fleet import PREFETCH_PER_WORKER, STALE_HEARTBEAT_SECONDS, Fleet
from streams.messages import Heartbeat
from streams.subjects import Priority

STANDARD = Priority.STANDARD


def beat(
    worker: str = "w", *, free: int = 4, tokens: int = 1000, version: str = "1", pulled: int = 0
) -> Heartbeat:
    return Heartbeat(
        worker=worker,
        model="m",
        version=version,
        free_sequences=free,
        free_tokens=tokens,
        running=0,
        waiting=0,
        max_sequences=4,
        kv_tokens=1000,
        generated_tokens=0,
        tokens_per_second=0.0,
        pulled={STANDARD: pulled} if pulled else {},
    )


def fill(fleet: Fleet, cost: int = 10, version: str = "1", first: int = 1) -> int:
    """Dispatch for as long as it fits; how many did."""
    count = 0
    while fleet.has_room_for(version, STANDARD, cost):
        fleet.reserve(version, STANDARD, cost)
        fleet.mark_published(version, STANDARD, first + count, cost)
        count += 1
    return count


def test_a_worker_is_sent_its_free_sequences_and_two_more() -> None:
    """Two wait in WORK, so that a slot that becomes free is filled without a round trip."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(free=4), 0)
    assert fill(fleet) == 4 + PREFETCH_PER_WORKER


def test_a_full_worker_is_sent_two() -> None:
    """They wait in WORK, where another worker may take them."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(free=0), 0)
    assert fill(fleet) == PREFETCH_PER_WORKER


def test_nothing_is_sent_to_nobody() -> None:
    """Work without a pool would wait where no fairness rules."""
    assert not Fleet().has_room_for("1", STANDARD, 1)


def test_tokens_bound_what_sequences_would_allow() -> None:
    """A long prompt takes the room of many short ones; two go out in any case, as prefetch."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(free=100, tokens=1000), 0)
    assert fill(fleet, cost=300) == 3
    assert Fleet().has_room_for("1", STANDARD, 0) is False


def test_a_request_larger_than_any_worker_is_sent_all_the_same() -> None:
    """The worker refuses it with the reason; in the queue it would block everybody behind it."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(tokens=1000), 0)
    assert fleet.has_room_for("1", STANDARD, 5000)


def test_a_large_request_waits_until_one_worker_has_room_for_it() -> None:
    """At a worker with too little it would wait for its turn, though others have more."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat("w1", tokens=600), 0)
    fleet.apply_heartbeat(beat("w2", tokens=500), 0)
    assert not fleet.has_worker_with_room("1", STANDARD, 700)
    assert fleet.has_worker_with_room("1", STANDARD, 600)
    assert fleet.find_roomiest("1", STANDARD, 600) == "w1"


def test_what_is_under_way_to_any_worker_may_take_the_room_of_a_large_request() -> None:
    """Of two that are sent at once the second would find that the first was placed there."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat("w1", tokens=1000), 0)
    fleet.apply_heartbeat(beat("w2", tokens=500), 0)
    fleet.reserve("1", STANDARD, 450)
    assert not fleet.has_worker_with_room("1", STANDARD, 600)
    fleet.place("1", STANDARD, 450, "w2")
    assert fleet.has_worker_with_room("1", STANDARD, 600)


def test_what_is_under_way_cannot_take_the_room_of_all_workers_at_once() -> None:
    """In a large fleet something always is; heavy tenants' large requests would never go."""
    fleet = Fleet()
    for number in range(64):
        fleet.apply_heartbeat(beat(f"w{number}", tokens=10_000), 0)
    for _ in range(20):
        fleet.reserve("1", STANDARD, 500)
    assert fleet.has_worker_with_room("1", STANDARD, 1300)


def test_what_was_pulled_waits_no_more() -> None:
    """The beat that says so also says what is free now."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(free=4), 0)
    fill(fleet)
    fleet.apply_heartbeat(beat(free=0, pulled=4), 0)
    assert fleet.pending_sequences == {5, 6}
    assert not fleet.has_room_for("1", STANDARD, 10)


def test_a_beat_may_be_faster_than_the_brokers_answer() -> None:
    """A worker can pull a message before the dispatcher knows its sequence."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(free=4), 0)
    fleet.reserve("1", STANDARD, 10)
    fleet.apply_heartbeat(beat(free=3, pulled=7), 0)
    fleet.mark_published("1", STANDARD, 7, 10)
    assert fleet.pending_sequences == set()
    assert fill(fleet, first=8) == 3 + PREFETCH_PER_WORKER


def test_a_silent_worker_does_not_count() -> None:
    """What it once had free says nothing about a process that may be dead."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat("w1", free=4), 0)
    fleet.apply_heartbeat(beat("w2", free=1), 2)
    assert fleet.remove_stale_workers(STALE_HEARTBEAT_SECONDS) == ["w1"]
    assert [b.worker for b in fleet.last_heartbeats()] == ["w2"]
    assert fill(fleet) == 1 + PREFETCH_PER_WORKER


def test_a_draining_worker_is_sent_nothing() -> None:
    """It pulls no more, so what is sent for it would wait for its neighbours."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(free=4), 0)
    fleet.apply_heartbeat(replace(beat(free=0), draining=True), 1)
    assert not fleet.has_room_for("1", STANDARD, 1)


def test_versions_have_their_own_credit() -> None:
    """The room of one is of no use to another."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat("w1", version="1"), 0)
    assert not fleet.has_room_for("2", STANDARD, 1)
    fill(fleet)
    fleet.apply_heartbeat(beat("w2", version="2", free=1), 0)
    assert fill(fleet, version="2", first=100) == 1 + PREFETCH_PER_WORKER


def test_a_worker_may_serve_several_versions() -> None:
    """It beats for each, and the beat of one says nothing of the other."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat("w", version="1", free=3), 0)
    fleet.apply_heartbeat(beat("w", version="2", free=1), 0)
    assert fleet.total_capacity.sequences == 2 * 4
    assert fill(fleet, version="1") == 3 + PREFETCH_PER_WORKER
    assert fill(fleet, version="2", first=100) == 1 + PREFETCH_PER_WORKER
    assert "w" in fleet
    fleet.remove_worker("w")
    assert "w" not in fleet
    assert fleet.last_heartbeats() == []
    assert not fleet.has_room_for("1", STANDARD, 1)


def test_what_has_left_work_by_another_way_frees_its_room() -> None:
    """Buried, or pulled by a worker that died before it could say so."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(free=0), 0)
    assert fill(fleet) == 2
    fleet.discard({1, 99})
    assert fleet.pending_sequences == {2}
    assert fill(fleet, first=3) == 1


def test_what_could_not_be_sent_takes_no_room() -> None:
    """The broker may refuse, or know the message already."""
    fleet = Fleet()
    fleet.apply_heartbeat(beat(free=0), 0)
    for _ in range(10):
        fleet.reserve("1", STANDARD, 10)
        fleet.release("1", STANDARD, 10)
    assert fill(fleet) == PREFETCH_PER_WORKER


class Credit(RuleBasedStateMachine):
    """Workers that pull, finish and beat late; the dispatcher sends whatever fits.

    What one worker has pulled and not told yet may be counted as room twice: the others' beats say
    that it was pulled. Beats follow a pull within milliseconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.work: list[int] = []
        self.held = {"w1": 0, "w2": 0}
        self.pulled = {"w1": 0, "w2": 0}
        self.untold = {"w1": 0, "w2": 0}
        self.seq = 0
        for worker in self.held:
            self.beat(worker)

    @rule()
    def send(self) -> None:
        if self.fleet.has_room_for("1", STANDARD, 1):
            self.seq += 1
            self.fleet.reserve("1", STANDARD, 1)
            self.fleet.mark_published("1", STANDARD, self.seq, 1)
            self.work.append(self.seq)
            self.never_more_than_the_room_and_the_prefetch()

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def pull(self, worker: str) -> None:
        if self.work and self.held[worker] < 4:
            self.pulled[worker] = self.work.pop(0)
            self.held[worker] += 1
            self.untold[worker] += 1

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def finish(self, worker: str) -> None:
        self.held[worker] = max(0, self.held[worker] - 1)

    @rule(worker=st.sampled_from(["w1", "w2"]))
    def beat(self, worker: str) -> None:
        free = 4 - self.held[worker]
        self.fleet.apply_heartbeat(beat(worker, free=free, pulled=self.pulled[worker]), 0)
        self.untold[worker] = 0

    def never_more_than_the_room_and_the_prefetch(self) -> None:
        out = len(self.work) + sum(self.held.values())
        assert out <= 2 * (4 + PREFETCH_PER_WORKER) + sum(self.untold.values())


TestCredit = Credit.TestCase
TestCredit.settings = settings(max_examples=100, stateful_step_count=60)


@given(st.lists(st.integers(1, 50), min_size=1, unique=True), st.data())
def test_the_room_is_whole_again_when_everything_has_left(
    sequences: list[int], data: st.DataObject
) -> None:
    """A request that leaked would take its room for ever."""
    fleet = Fleet()
    for seq in sequences:
        fleet.reserve("1", STANDARD, seq)
        fleet.mark_published("1", STANDARD, seq, seq)
    gone = set(data.draw(st.lists(st.sampled_from(sequences), unique=True)))
    fleet.discard(gone)
    assert fleet.pending_sequences == set(sequences) - gone
    fleet.apply_heartbeat(beat(free=4, pulled=50), 0)
    assert fill(fleet, first=51) == 4 + PREFETCH_PER_WORKER


def test_a_worker_that_serves_one_version_no_longer_serves_the_others() -> None:
    """Its last heartbeat for the one says nothing of them."""
    fleet = Fleet()
    for version in ("1", "2"):
        fleet.apply_heartbeat(beat(version=version), 0)
    fleet.remove_worker("w", "1")
    assert (fleet.count_workers("1"), fleet.count_workers("2")) == (0, 1)
    fleet.remove_worker("w", "1")
    fleet.remove_worker("w")
    assert "w" not in fleet

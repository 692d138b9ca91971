"""Who is next when tenants share a fleet: parts, what is kept free, what gives way. Pure."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.fair_queue import service_tokens
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.workers.fleet import PREFETCH_PER_WORKER
from streams.headers import Envelope
from streams.messages import Heartbeat
from streams.subjects import PoolKey, Priority

KV, PLACES = 10_000, 20
INTERACTIVE, STANDARD, BATCH = Priority
_SEQUENCE = itertools.count(1)


class Cell:
    """A leader's books and one worker that holds what was sent until it is told to end it."""

    def __init__(self, preempts: bool = False) -> None:
        self.books, self.preempts = ModelState("m"), preempts
        self.now, self.pulled = 0.0, 0
        self.held: dict[str, tuple[QueuedRequest, Priority]] = {}
        self.beat()

    def ask(
        self, tenant: str, count: int = 1, priority: Priority = STANDARD, cost: int = 500
    ) -> None:
        for _ in range(count):
            seq = next(_SEQUENCE)
            name, prompt = f"r{seq}", cost // 2
            item = QueuedRequest(name, tenant, priority, prompt, cost, 0, 10**12, "r", "", seq, "")
            self.books.queue.enqueue(item, self.now)

    def send(self) -> list[QueuedRequest]:
        """All that may go now."""
        sent = []
        while found := self.books.select_next(lambda item: "1", self.now):
            item, _ = found
            lane = self.books.reserve(item, "1", self.now)
            self.pulled += 1
            self.books.mark_published(item.request_id, self.pulled, duplicate=False)
            self.held[item.request_id] = item, lane
            sent.append(item)
            self.beat()
        return sent

    def end(self, tenant: str, count: int = 1) -> None:
        """The oldest requests of a tenant end, having generated all that they might."""
        names = [name for name, (item, _) in self.held.items() if item.tenant == tenant]
        for name in names[:count]:
            item, _ = self.held.pop(name)
            spent = service_tokens(item.prompt_tokens, item.cost - item.prompt_tokens)
            self.books.settle(name, spent, self.now)
        self.beat()

    def room(self, lanes: set[Priority]) -> tuple[int, int]:
        held = [item.cost for item, lane in self.held.values() if lane in lanes]
        return PLACES - len(held), max(0, KV - sum(held))

    def beat(self, progress: list[tuple[int, int]] | None = None) -> None:
        sequences, tokens = self.room(set(Priority))
        beat = Heartbeat(
            worker="w",
            model="m",
            version="1",
            free_sequences=max(0, sequences),
            free_tokens=tokens,
            running=len(self.held),
            waiting=max(0, -sequences),
            max_sequences=PLACES,
            kv_tokens=KV,
            generated_tokens=0,
            tokens_per_second=0.0,
            pulled=dict.fromkeys(map(str, Priority), self.pulled),
            progress=progress or [],
        )
        if self.preempts:
            above = {p: {q for q in Priority if not p.is_above(q)} for p in Priority}
            beat = replace(beat, room={str(p): self.room(above[p]) for p in Priority})
        self.books.apply_heartbeat(beat, self.now)

    def by_tenant(self) -> Counter[str]:
        return Counter(item.tenant for item, _ in self.held.values())

    def live(self, seconds: int, quiet: tuple[str, ...]) -> None:
        """Each second one of the quiet asks, and one of what each tenant holds ends."""
        for number in range(seconds):
            self.now += 1
            self.ask(quiet[number % len(quiet)])
            self.send()
            for tenant in list(self.by_tenant()):
                self.end(tenant)


QUIET = ("q1", "q2", "q3")


@pytest.mark.parametrize("preempts", [False, True])
def test_a_lone_tenant_has_the_whole_fleet(preempts: bool) -> None:
    """A cap without anybody to protect would only leave the fleet idle."""
    cell = Cell(preempts)
    cell.ask("lone", 100)
    assert len(cell.send()) >= KV // 500


def test_nothing_of_a_lone_tenant_gives_way() -> None:
    """There is nobody to give way to; what gives way tells nothing of how long requests take."""
    cell = Cell(preempts=True)
    cell.ask("lone", 100)
    cell.send()
    assert {lane for _, lane in cell.held.values()} == {STANDARD}


def test_room_is_kept_for_those_who_have_asked_of_late() -> None:
    """Fair shares say who is next, too late for one who finds that nothing is free."""
    cell = Cell()
    cell.live(60, QUIET)
    cell.ask("loud", 1000)
    for _ in range(30):
        cell.live(1, QUIET)
    cell.send()
    assert cell.room(set(Priority))[1] >= 500
    cell.ask("q1")
    assert [item.tenant for item in cell.send()] == ["q1"]


def test_what_is_kept_free_is_given_back_when_nobody_asks_for_it() -> None:
    """The memory of demand fades, and the fleet is full again."""
    cell = Cell()
    cell.live(60, QUIET)
    cell.ask("loud", 1000)
    cell.live(30, QUIET)
    for tenant in QUIET:
        cell.end(tenant, PLACES)
    cell.now += 600
    cell.send()
    assert cell.by_tenant()["loud"] >= KV // 500


def test_backlogged_tenants_are_kept_from_nothing() -> None:
    """Among those who all want more than their part fair shares alone decide."""
    cell = Cell()
    for tenant in ("a", "b"):
        cell.ask(tenant, 200)
    cell.send()
    assert sum(cell.by_tenant().values()) >= KV // 500
    for _ in range(100):
        cell.now += 1
        for tenant in ("a", "b"):
            cell.end(tenant)
        cell.send()
    counters = [cell.books.queue.counter(tenant) for tenant in ("a", "b")]
    assert abs(counters[0] - counters[1]) <= 2 * service_tokens(250, 250)


def test_what_is_beyond_a_part_gives_way_where_engines_preempt() -> None:
    """It fills the fleet, and whoever is within a part takes its place at once."""
    cell = Cell(preempts=True)
    cell.live(60, QUIET)
    cell.ask("loud", 1000)
    cell.send()
    lanes = {lane for item, lane in cell.held.values() if item.tenant == "loud"}
    assert BATCH in lanes
    cell.ask("q1", 3)
    assert [item.tenant for item in cell.send()] == ["q1"] * 3


def test_what_gives_way_is_charged_half_of_its_answer_until_it_has_more() -> None:
    """It may stand aside for long: two tenants whose work does would not get what they pay for."""
    cell = Cell(preempts=True)
    cell.live(60, QUIET)
    cell.ask("loud", 1000)
    cell.send()
    lanes = {lane: name for name, (item, lane) in cell.held.items() if item.tenant == "loud"}
    within, beyond = (cell.books.in_flight[lanes[lane]] for lane in (STANDARD, BATCH))
    assert within.charged == service_tokens(250, 250)
    assert beyond.charged == service_tokens(250, 125)
    cell.beat([(beyond.seq, 200)])
    assert beyond.charged == service_tokens(250, 200)


def test_a_new_leader_charges_what_gives_way_as_the_last_one_did() -> None:
    """By the lane that it lies in, and the priority that its client asked for."""
    books = ModelState("m")
    for name, priority in (("beyond", "standard"), ("batch", "")):
        asked = Envelope(name, name, "r", 500, 250, 10**12, 0, priority=priority)
        books.adopt(asked, PoolKey("m", "1", BATCH), seq=len(name))
    assert books.queue.counter("beyond") == service_tokens(250, 125)
    assert books.queue.counter("batch") == service_tokens(250, 250)


def test_who_has_got_more_than_those_that_wait_is_not_calm() -> None:
    """It asks bit by bit for less than two parts, and would have more than its share for ever."""
    cell = Cell(preempts=True)
    cell.ask("often")
    for tenant in ("a", "b"):
        cell.ask(tenant, 40)
    cell.send()
    stands = []
    for _ in range(5):
        cell.now += 1
        cell.end("often", 8)
        cell.ask("often", 8)
        cell.send()
        lanes = [lane for item, lane in cell.held.values() if item.tenant == "often"]
        stands.append(500 * lanes.count(STANDARD))
    assert stands[0] == 8 * 500
    assert stands[-1] <= KV / 3


@pytest.mark.parametrize(("cost", "lane"), [(KV // 5, STANDARD), (KV // 4, BATCH)])
def test_a_request_larger_than_two_parts_gives_way(cost: int, lane: Priority) -> None:
    """A prompt of a thousand pages is not read before everybody's next sentence.

    What a calm tenant may ask for in pieces it may ask for at once: among work that gives way it
    would wait behind all that of a loud one.
    """
    cell = Cell(preempts=True)
    cell.live(16, tuple(f"q{number}" for number in range(8)))
    cell.ask("long", cost=cost)
    (item,) = cell.send()
    assert cell.held[item.request_id][1] is lane


def test_a_fleet_full_of_batch_work_takes_an_urgent_request() -> None:
    """Preemption can only fire if credit lets the request through."""
    cell = Cell(preempts=True)
    cell.ask("a", 100, BATCH)
    cell.send()
    cell.ask("b", 1, INTERACTIVE)
    assert [item.tenant for item in cell.send()] == ["b"]


def test_batch_work_fills_what_is_left_and_is_not_starved() -> None:
    """Nobody else asks for anything: all of the fleet is left."""
    cell = Cell()
    cell.ask("a", 100, BATCH)
    assert len(cell.send()) >= KV // 500


def test_batch_work_trickles_through_a_flood() -> None:
    """It was accepted, so it must come to an end."""
    cell = Cell()
    cell.ask("flood", 500)
    cell.ask("patient", 1, BATCH)
    for _ in range(20):
        cell.now += 1
        cell.send()
        cell.end("flood")
    assert not cell.books.queue.count_queued(BATCH)[0]


def test_reserved_capacity_waits_for_whom_it_is_reserved() -> None:
    """It was paid for: no other's backlog takes it, and it is there at once."""
    cell = Cell()
    cell.books.queue.set_reserved_tokens({"gold": 2000})
    cell.ask("other", 100)
    cell.send()
    assert cell.room(set(Priority))[1] >= 2000
    cell.ask("gold", 4)
    assert [item.tenant for item in cell.send()][:4] == ["gold"] * 4


def test_reserved_capacity_is_there_however_much_its_tenant_has_had() -> None:
    """Whoever is ahead of it by the counters may not take that room, and keeps nobody from it."""
    cell = Cell()
    cell.books.queue.set_reserved_tokens({"gold": 2000})
    cell.ask("other", 100)
    cell.send()
    cell.books.queue.charge("gold", 10**6)
    cell.ask("gold", 4)
    assert [item.tenant for item in cell.send()][:4] == ["gold"] * 4


def test_a_request_that_leaves_no_room_for_a_reservation_runs_on_an_idle_fleet() -> None:
    """Else it would wait for ever, beside a fleet that does nothing."""
    cell = Cell()
    cell.books.queue.set_reserved_tokens({"gold": KV // 2})
    cell.ask("long", cost=KV)
    assert len(cell.send()) == 1


def test_a_large_request_is_not_passed_for_ever_by_small_ones() -> None:
    """It fits, but leaves no room for a reservation, which small ones do each time one ends."""
    cell = Cell()
    cell.books.queue.set_reserved_tokens({"gold": 2000})
    cell.ask("noisy", 200)
    cell.send()
    cell.ask("large", cost=4500)
    for _ in range(KV // 500):
        cell.end("noisy")
        cell.send()
    assert cell.by_tenant()["large"] == 1


def test_nobody_queues_for_a_place_that_is_reserved() -> None:
    """What waits in WORK would take it at the moment that its tenant's request ends."""
    cell = Cell()
    cell.books.queue.set_reserved_tokens({"gold": 2000})
    cell.ask("gold", 4)
    cell.ask("other", 100)
    cell.send()
    others = cell.by_tenant()["other"]
    cell.end("gold", 4)
    cell.send()
    assert cell.by_tenant()["other"] == others == (KV - 2000) // 500


def test_who_has_used_its_reservation_is_like_the_others() -> None:
    """More than that is a matter of fair shares again."""
    cell = Cell()
    cell.books.queue.set_reserved_tokens({"gold": 1000})
    cell.ask("gold", 100)
    assert len(cell.send()) >= KV // 500


def test_progress_beyond_what_was_expected_is_charged_while_it_runs() -> None:
    """Else who has long answers would be served at the price of short ones until they end."""
    cell = Cell()
    for _ in range(20):
        cell.books.queue.learn_output_length("a", 10)
    cell.ask("a")
    (item,) = cell.send()
    before = cell.books.queue.counter("a")
    assert before == service_tokens(250, 10)
    cell.beat(progress=[(cell.pulled, 200)])
    assert cell.books.queue.counter("a") == service_tokens(250, 200)
    cell.books.settle(item.request_id, service_tokens(250, 220), cell.now)
    assert cell.books.queue.counter("a") == service_tokens(250, 220)


def test_progress_below_what_was_expected_is_not_refunded_before_the_end() -> None:
    """A request that has just begun has generated little, and will cost what it is charged."""
    cell = Cell()
    cell.ask("a")
    cell.send()
    before = cell.books.queue.counter("a")
    cell.beat(progress=[(cell.pulled, 1), (9999, 50)])
    assert cell.books.queue.counter("a") == before


TENANTS = ("a", "b", "c", "d")
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(TENANTS), st.sampled_from(Priority), st.integers(1, 30)),
    st.tuples(st.sampled_from(TENANTS), st.none(), st.integers(1, 30)),
)


@settings(max_examples=60)
@given(st.booleans(), st.lists(ACTIONS, max_size=40), st.integers(100, 3000))
def test_whatever_happened_an_idle_fleet_serves_whoever_waits(
    preempts: bool, actions: list[tuple[str, Priority | None, int]], cost: int
) -> None:
    """Caps and what is kept free bound who goes first; none may stop the last from going at all."""
    cell = Cell(preempts)
    for tenant, priority, count in actions:
        cell.now += 0.5
        if priority is None:
            cell.end(tenant, count)
        else:
            cell.ask(tenant, count, priority, cost)
        cell.send()
    while len(cell.books.queue):
        cell.now += 1
        for tenant in TENANTS:
            cell.end(tenant, len(cell.held))
        assert cell.send()
    for tenant in TENANTS:
        cell.end(tenant, len(cell.held))
    division = cell.books.queue.capacity_shares
    for account in division.tenants.values():
        assert (
            account.in_flight_load.tokens,
            account.queued_load.tokens,
            account.is_above_share,
        ) == (0, 0, False)
    assert cell.room(set(Priority)) == (PLACES, KV)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(50, 1500), st.integers(50, 1500)), min_size=20, max_size=60))
def test_the_gap_between_backlogged_tenants_is_bounded(sizes: list[tuple[int, int]]) -> None:
    """By what one of them can be ahead in flight: the fleet and its prefetch, in virtual tokens."""
    cell = Cell()
    for pair in sizes:
        for tenant, cost in zip("ab", pair, strict=True):
            cell.ask(tenant, cost=cost)
    while {tenant for tenant, _, _ in cell.books.queue.tenant_queues()} == {"a", "b"}:
        cell.now += 1
        cell.send()
        gap = cell.books.queue.counter("a") - cell.books.queue.counter("b")
        assert abs(gap) <= 2 * (KV + PREFETCH_PER_WORKER * 1500)
        for tenant in "ab":
            cell.end(tenant)

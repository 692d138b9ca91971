"""What requests are told to expect: of a small queue whose fleet releases at a known rate."""

import math
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.dispatching.model_state import ModelState
from dispatcher.estimate.moving_averages import DecayingLineFit, DecayingRatio
from dispatcher.estimate.service_rate import FIRST_END_FACTOR, FULL_FLEET_FACTOR
from dispatcher.estimate.time_model import MIN_REQUESTS
from dispatcher.reconcile import checkpoint
from dispatcher.reconcile.checkpoint import Checkpoint
from streams.messages import Heartbeat, LedgerRecord
from streams.subjects import Priority
from tests.unit.dispatcher.queued_requests import COST, queued_request

STEP = 0.2


def beat(free: int = 0) -> Heartbeat:
    pulled = {"standard": 10**9}  # nothing is left in WORK
    return Heartbeat("w", "mock", "1", free, free * COST, 4, 0, 4, 4 * COST, 0, 0.0, pulled)


def record(request_id: str, **more: object) -> LedgerRecord:
    values = {
        "request_id": request_id,
        "tenant": "acme",
        "model": "mock",
        "version": "1",
        "outcome": "stop",
        "prompt_tokens": 50,
        "completion_tokens": 50,
        "attempts": 1,
        "worker": "w",
        "accepted": 0,
        "finished": 3000,
        "first": 1000,
    }
    return LedgerRecord(**{**values, **more})  # type: ignore[arg-type]  # of a test


class Model:
    """A fleet that is full and ends one request each `STEP`."""

    def __init__(self) -> None:
        self.books, self.now, self.number = ModelState("mock"), 0.0, 0

    def ask(self, tenant: str, count: int, priority: Priority = Priority.STANDARD) -> None:
        for _ in range(count):
            self.books.queue.enqueue(queued_request(self.number, tenant, priority), self.now)
            self.number += 1

    def serve(self, count: int, service: int = 150) -> None:
        """So many requests, in the fair order, each of which takes so many virtual tokens."""
        for _ in range(count):
            item = self.books.queue.peek(self.now)
            assert item
            self.books.fleet.apply_heartbeat(beat(free=1), self.now)
            self.books.reserve(item, "1", self.now)
            self.books.mark_published(item.request_id, item.seq, duplicate=False)
            self.books.settle(item.request_id, service, self.now)
            self.now += STEP
            self.books.fleet.apply_heartbeat(beat(), self.now)
            self.books.tick(self.now)

    def wait(self, tenant: str, priority: Priority = Priority.STANDARD) -> float | None:
        return self.books.build_pressure().estimated_wait(tenant, priority)


@pytest.fixture
def model() -> Model:
    made = Model()
    made.books.tick(0.0)
    return made


def test_a_light_tenant_waits_little_behind_a_heavy_one(model: Model) -> None:
    """Ten thousand queued requests are ahead of its own next one, and of nobody else's."""
    model.ask("heavy", 10_000)
    model.serve(150)
    assert model.wait("heavy") == pytest.approx(9851 * STEP, rel=0.05)
    assert model.wait("light") == pytest.approx(STEP, rel=0.2)
    model.ask("light", 5)
    assert model.wait("light") == pytest.approx(10 * STEP, rel=0.25)


def test_what_was_told_is_what_comes(model: Model) -> None:
    """The estimate at acceptance against when it really is its turn."""
    for tenant in ("a", "b", "c"):
        model.ask(tenant, 60)
    model.serve(40)
    told, last = model.wait("b"), f"r{model.number}"
    model.ask("b", 1)
    came = model.now
    while model.books.queue.get(last):
        model.serve(1)
    assert told == pytest.approx(model.now - came, rel=0.15)


def run(model: Model, count: int, seconds: float, generated: int) -> None:
    """Give the fleet so many requests, of which each then has generated so many tokens."""
    model.ask("acme", count)
    first = model.number - count
    for number in range(first, model.number):
        item = model.books.queue.get(f"r{number}")
        assert item
        model.books.reserve(item, "1", model.now)
        model.books.mark_published(item.request_id, item.seq, duplicate=False)
    model.books.tick(model.now)
    model.now += seconds
    progress = [(number + 1, generated) for number in range(first, model.number)]
    model.books.fleet.apply_heartbeat(beat(), model.now)
    model.books.apply_heartbeat(replace(beat(), progress=progress), model.now)
    model.books.tick(model.now)


def test_requests_that_were_cancelled_unserved_leave_a_wait(model: Model) -> None:
    """They were charged nothing, so that no counter tells how far a tenant's queue goes."""
    model.ask("acme", 20)
    model.serve(10, service=0)
    assert model.wait("acme") == pytest.approx(11 * STEP, rel=0.25)


def test_before_anything_has_advanced_nobody_is_told_a_wait(model: Model) -> None:
    """Nor refused: a guess would be as wrong as it could be."""
    model.books.fleet.apply_heartbeat(beat(), 0.0)
    model.ask("acme", 4)
    model.books.tick(STEP)
    assert model.wait("acme") is None


def test_a_fleet_that_has_just_filled_is_known_by_how_its_requests_advance(model: Model) -> None:
    """A half of 50 + 2 * 50 in a second: 2 s each, four at once, the first in 1.5 of them."""
    model.books.fleet.apply_heartbeat(beat(), 0.0)
    run(model, 4, seconds=1.0, generated=12)
    model.ask("acme", 8)
    model.books.tick(model.now)
    duration = 150 / (50 + 2 * 12)
    first_end = FIRST_END_FACTOR * duration
    turns = 9 / 4 * FULL_FLEET_FACTOR * duration
    assert model.wait("acme") == pytest.approx(first_end + turns, rel=0.01)


def test_a_restarted_leader_knows_how_fast_the_fleet_is(model: Model) -> None:
    """And one whose model had no worker for a night."""
    model.ask("acme", 200)
    model.serve(100)
    told = model.wait("acme")
    saved = Checkpoint.unpack(checkpoint.capture(model.books, 0, model.now).pack())
    successor = Model()
    successor.books.tick(0.0)
    checkpoint.restore(successor.books, saved)
    successor.ask("acme", 100)
    successor.books.fleet.apply_heartbeat(beat(), 0.0)
    successor.books.tick(STEP)
    assert told
    assert successor.wait("acme") == pytest.approx(told, rel=0.05)


def test_a_fleet_that_frees_nothing_is_slow(model: Model) -> None:
    """Where all began together nothing comes free for long, whatever ends."""
    model.ask("acme", 80)
    model.serve(50)
    before = model.wait("acme")
    for _ in range(50):
        model.now += STEP
        model.books.fleet.apply_heartbeat(beat(), model.now)
        model.books.tick(model.now)
    after = model.wait("acme")
    assert before
    assert after
    assert after > 1.8 * before


def test_more_urgent_work_is_ahead(model: Model) -> None:
    """Priorities are strict."""
    model.ask("acme", 100)
    model.serve(50)
    model.ask("other", 20, Priority.INTERACTIVE)
    model.ask("batch", 1, Priority.BATCH)
    assert model.wait("new", Priority.INTERACTIVE) == pytest.approx(STEP, rel=0.2)
    assert model.wait("new") == pytest.approx(21 * STEP, rel=0.2)
    assert model.wait("new", Priority.BATCH) == pytest.approx(71 * STEP, rel=0.2)


def test_nobody_waits_for_an_idle_fleet(model: Model) -> None:
    """Nor where there is room and what is queued is kept back for another reason."""
    assert model.wait("acme") == 0.0
    model.ask("acme", 100)
    model.serve(50)
    model.books.fleet.apply_heartbeat(beat(free=4), model.now)
    assert model.wait("light") == 0.0


def test_batch_work_that_gives_way_makes_nobody_wait(model: Model) -> None:
    """It fills the fleet, and more of it waits; a worker tells what it has for whom."""
    model.ask("acme", 100, Priority.BATCH)
    model.serve(50)
    room = {"interactive": (2, 2 * COST), "standard": (2, 2 * COST), "batch": (0, 0)}
    model.books.fleet.apply_heartbeat(replace(beat(), room=room), model.now)
    pressure = model.books.build_pressure()
    assert pressure.estimated_wait("new", Priority.INTERACTIVE) == 0.0
    assert pressure.room_tokens == {"interactive": 200, "standard": 200, "batch": 0}
    assert model.wait("new", Priority.BATCH)


def test_work_that_gives_way_tells_nothing_of_computing(model: Model) -> None:
    """The seconds to its first output are those for which it stood aside."""
    for number in range(2 * MIN_REQUESTS):
        item = queued_request(number, "acme", Priority.BATCH)
        model.books.queue.enqueue(item, 0.0)
        model.books.reserve(item, "1", 0.0)
        model.books.mark_published(item.request_id, item.seq, duplicate=False)
        model.books.learn_duration(record(item.request_id))
    assert model.books.build_pressure().compute is None


def test_ten_thousand_tenants_are_told_in_a_bounded_message(model: Model) -> None:
    """Those that wait longest; the others are as those that wait for nothing."""
    model.ask("first", 40)
    model.serve(20)
    for number in range(10_000):
        model.ask(f"tenant-number-{number:06}", 1 + number % 3)
    packed = model.books.build_pressure().pack()
    assert len(packed) < 10_000
    assert len(msgpack.unpackb(packed)["tenants"]) <= 3 * 64


def test_wrong_estimates_are_corrected(model: Model) -> None:
    """What overtakes, and what caps hold back, is in no sum."""
    pace = model.books.estimator.service_rate
    model.ask("acme", 100)
    model.serve(40)
    for _ in range(400):
        pace.record_wait(10.0 * pace.correction, 15.0)
    assert pace.correction == pytest.approx(1.5, rel=0.02)
    for _ in range(400):
        pace.record_wait(0.1, 5.0)  # too short to tell anything
    assert pace.correction == pytest.approx(1.5, rel=0.02)
    assert pace.uncertainty < 0.1


def test_that_the_first_guess_was_wrong_corrects_no_estimate(model: Model) -> None:
    """What was told by it comes out of the queue when the pace is known, and right."""
    model.ask("acme", 100)
    model.serve(10)
    model.books.estimator.service_rate.record_wait(20.0, 2.0)
    assert model.books.estimator.service_rate.correction == 1.0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.sampled_from("ab"), st.sampled_from(Priority)),
            st.tuples(st.just("dispatch"), st.none(), st.none()),
            st.tuples(st.just("end"), st.none(), st.none()),
            st.tuples(st.just("beat"), st.integers(0, 4), st.booleans()),
            st.tuples(st.just("leave"), st.none(), st.none()),
            st.tuples(st.just("wait"), st.sampled_from((0.2, 5.0, 100.0)), st.none()),
        ),
        max_size=30,
    )
)
def test_pressure_can_be_told_whatever_has_happened(events: list[tuple[Any, Any, Any]]) -> None:
    """A leader falls with its report: no workers, nothing ended, tenants that have left."""
    model = Model()
    model.books.tick(0.0)
    for event, first, second in events:
        books = model.books
        if event == "ask":
            model.ask(first, 1, second)
        elif event == "dispatch" and (item := books.queue.peek(model.now)):
            books.reserve(item, "1", model.now)
            books.mark_published(item.request_id, item.seq, duplicate=False)
        elif event == "end" and books.in_flight:
            books.settle(next(iter(books.in_flight)), 150, model.now)
        elif event == "beat":
            room = {each.value: (first, first * COST) for each in Priority} if second else {}
            books.apply_heartbeat(replace(beat(first), room=room), model.now)
        elif event == "leave":
            books.remove_worker("w")
        elif event == "wait":
            model.now += first
        books.select_next(lambda _: "1", model.now)
        books.tick(model.now)
        pressure = books.build_pressure()
        waits = [*pressure.wait_seconds.values(), *pressure.room_tokens.values()]
        assert all(each is None or 0 <= each < math.inf for each in waits)


def test_a_model_is_unmanned_since_its_last_worker(model: Model) -> None:
    """And since its leader began, if there was none yet."""
    model.books.tick(5.0)
    assert model.books.build_pressure().unmanned_seconds == 5.0
    model.books.fleet.apply_heartbeat(beat(), 5.0)
    model.books.tick(6.0)
    assert model.books.build_pressure().unmanned_seconds == 0.0
    model.books.tick(16.0)
    assert model.books.build_pressure().unmanned_seconds == 10.0


def ended(model: Model, count: int) -> None:
    for number in range(count):
        item = queued_request(number, "acme")
        model.books.queue.enqueue(item, 0.0)
        model.books.reserve(item, "1", 0.0)
        model.books.mark_published(item.request_id, item.seq, duplicate=False)
        model.books.learn_duration(record(item.request_id))
        model.books.settle(item.request_id, 150, 0.0)


def test_what_waited_is_late_when_its_first_output_would_be(model: Model) -> None:
    """It takes a second, as those before it have; one that need not wait is always tried."""
    item = queued_request(0, "acme")
    ended(model, MIN_REQUESTS - 1)
    assert not model.books.estimator.will_miss_deadline(item, 9.5)
    ended(model, 1)
    assert model.books.estimator.will_miss_deadline(item, 9.5)
    assert not model.books.estimator.will_miss_deadline(item, 8.5)
    item.accepted = 9000
    assert not model.books.estimator.will_miss_deadline(item, 9.5)


def test_computing_is_learned_from_what_was_answered(model: Model) -> None:
    """A cancelled request, or a second attempt, tells nothing of how long one takes."""
    ended(model, 2 * MIN_REQUESTS)
    compute = model.books.build_pressure().compute
    assert compute
    assert compute.first_seconds(50) == pytest.approx(1.0)
    assert compute.seconds(50, 50) == pytest.approx(3.0)
    for wrong in ({"outcome": "cancelled"}, {"attempts": 2}, {"first": 0}):
        model.books.estimator.learn_duration(0.0, COST, record("r", finished=99_000, **wrong))
    assert model.books.build_pressure().compute == compute


def test_a_line_has_no_negative_part() -> None:
    """Noise must not make longer prompts faster, nor short ones free of cost twice."""
    line = DecayingLineFit(memory=100)
    assert line.fit == (0.0, 0.0)
    for x in (10, 20, 30):
        line.add(x, 1 + 0.1 * x)
    begins, rises = line.fit
    assert begins == pytest.approx(1, abs=0.05)
    assert rises == pytest.approx(0.1, abs=0.005)
    falling = DecayingLineFit(memory=100)
    falling.add(10, 3.0)
    falling.add(20, 1.0)
    assert falling.fit[1] == 0.0


def test_a_ratio_begins_with_what_is_believed() -> None:
    """And comes to what is seen."""
    ratio = DecayingRatio(memory=10, prior=2.0, weight=1.0)
    assert ratio.value == 2.0
    for _ in range(50):
        ratio.add(1.0, 1.0)
    assert ratio.value == pytest.approx(1.0, abs=0.1)
    assert DecayingRatio(memory=10, prior=3.0).value == 3.0

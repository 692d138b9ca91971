"""A new leader goes on with the tenants' counters where its predecessor was. Pure."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.dispatching.model_state import ModelState
from dispatcher.queueing.fair_queue import service_tokens
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.reconcile import checkpoint
from dispatcher.reconcile.checkpoint import Checkpoint
from streams import messages
from streams.headers import Envelope
from streams.messages import Heartbeat, LedgerRecord
from streams.subjects import PoolKey, Priority

_SEQUENCE = itertools.count(1)
POOL = PoolKey("m", "1", Priority.STANDARD)
GENERATED = 40


def ask(books: ModelState, tenant: str, at: float) -> QueuedRequest:
    seq = next(_SEQUENCE)
    accepted, never = round(at * 1000), 10**12
    item = QueuedRequest(
        f"r{seq}", tenant, Priority.STANDARD, 50, 150, accepted, never, "", "", seq, ""
    )
    books.queue.enqueue(item, at)
    return item


def beat(held: int, pulled: dict[str, int]) -> Heartbeat:
    """Of one worker with eight places."""
    free = 8 - held
    return Heartbeat("w", "m", "1", free, 500 * free, held, 0, 8, 4000, 0, 0.0, pulled)


def led(tenants: dict[str, float]) -> ModelState:
    """The books of a leader with one worker."""
    books = ModelState("m")
    for tenant, weight in tenants.items():
        books.queue.set_weight(tenant, weight)
    books.apply_heartbeat(beat(0, {}), 0.0)
    return books


class Run:
    """A leader, what it has in flight, and the ledger that outlives it."""

    def __init__(self, tenants: dict[str, float]) -> None:
        self.tenants, self.books = tenants, led(tenants)
        self.flying: list[QueuedRequest] = []
        self.ledger: list[LedgerRecord] = []

    def send(self, now: float) -> None:
        while found := self.books.select_next(lambda item: "1", now):
            item, _ = found
            self.books.reserve(item, "1", now)
            self.books.mark_published(item.request_id, item.seq, duplicate=False)
            self.flying.append(item)
            self.beat(now)

    def end(self, now: float, heard: bool = True) -> None:
        """The oldest ends; the leader may die before it hears of it."""
        item = self.flying.pop(0)
        record = LedgerRecord(
            item.request_id, item.tenant, "m", "1", "stop", 50, GENERATED, 1, "w", 0, 0
        )
        self.ledger.append(record)
        if heard:
            self.books.settle(item.request_id, service_tokens(50, GENERATED), now)
            self.beat(now)

    def beat(self, now: float) -> None:
        pulled = {str(POOL.priority): self.flying[-1].seq} if self.flying else {}
        self.books.apply_heartbeat(beat(len(self.flying), pulled), now)

    def waiting(self) -> list[QueuedRequest]:
        lanes = (lane for _, _, lane in self.books.queue.tenant_queues())
        return [item for lane in lanes for item in lane.items if not item.is_removed]

    def successor(self, kept: Checkpoint, now: float) -> ModelState:
        """Another leader's books, from what the broker has."""
        books = ModelState("m")
        checkpoint.restore(books, Checkpoint.unpack(kept.pack()))
        for tenant, weight in self.tenants.items():
            books.queue.set_weight(tenant, weight)
        for item in self.flying:
            envelope = Envelope(item.request_id, item.tenant, "", item.cost, 50, item.deadline, 0)
            books.adopt(envelope, POOL, item.seq)
        for record in self.ledger[kept.ledger_seq :]:
            books.replay(record, now)
        for item in sorted(self.waiting(), key=lambda item: item.seq):
            books.queue.enqueue(item, now)
        return books


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(0, 30))
def test_a_successor_has_the_counters_of_its_predecessor(random, after: int) -> None:  # type: ignore[no-untyped-def]
    """Of whoever waits, whatever has ended since the checkpoint, heard by the old leader or not."""
    run = Run({"a": 1.0, "b": 2.0, "c": 1.0})
    for step in range(60):
        for tenant in random.choices("abc", weights=(6, 3, 1), k=random.randint(0, 3)):
            ask(run.books, tenant, float(step))
        run.send(float(step))
        while run.flying and random.random() < 0.6:
            run.end(float(step))
    for tenant in "abc" * 30:
        ask(run.books, tenant, 60.0)
    run.send(60.0)
    kept = checkpoint.capture(run.books, len(run.ledger), 61.0)
    for _ in range(after):
        run.end(62.0)
        run.send(62.0)
    successor = run.successor(kept, 63.0)
    while run.flying:
        run.end(64.0)
        record = run.ledger[-1]
        successor.settle(record.request_id, service_tokens(50, GENERATED), 64.0)
    for tenant in "abc":
        expected = run.books.queue.counter(tenant)
        assert successor.queue.counter(tenant) == pytest.approx(expected, abs=1.0)


def test_what_ended_unheard_is_charged_once() -> None:
    """The ledger has it, `WORK` may still have it, and the broker may tell of it once more."""
    run = Run({"a": 1.0})
    for _ in range(3):
        ask(run.books, "a", 0.0)
    run.send(0.0)
    kept = checkpoint.capture(run.books, 0, 1.0)
    ended = run.flying[0]
    run.end(1.0, heard=False)
    books = run.successor(kept, 2.0)
    before = books.queue.counter("a")
    books.replay(run.ledger[0], 2.0)
    envelope = Envelope(ended.request_id, "a", "", ended.cost, 50, ended.deadline, 0)
    books.adopt(envelope, POOL, ended.seq)
    assert (
        books.queue.counter("a")
        == before
        == service_tokens(50, GENERATED) + 2 * service_tokens(50, 100)
    )


def test_who_has_waited_all_along_is_not_taken_for_one_that_returns() -> None:
    """It would lose what it is owed: everybody would be lifted to whoever is indexed first."""
    run = Run({"rich": 1.0, "poor": 1.0})
    run.books.queue.charge("rich", 10_000)
    for tenant in ("rich", "poor"):
        run.books.queue.capacity_shares.get_tenant(
            tenant
        ).queued_requests += 1  # so that it is not lifted here
        ask(run.books, tenant, 1.0)
        run.books.queue.capacity_shares.get_tenant(tenant).queued_requests -= 1
    kept = checkpoint.capture(run.books, 0, 2.0)
    books = run.successor(kept, 3.0)
    assert books.queue.counter("rich") - books.queue.counter("poor") == 10_000
    ask(books, "newcomer", 3.0)
    assert books.queue.counter("newcomer") == books.queue.counter("poor")


def test_recent_demand_is_not_counted_anew() -> None:
    """A thousand requests that have waited for a minute are not a burst of now."""
    run = Run({"a": 1.0})
    for _ in range(1000):
        ask(run.books, "a", 0.0)
    kept = checkpoint.capture(run.books, 0, 60.0)
    run.books.queue.capacity_shares.get_tenant("a").demand.decay(61.0)
    books = run.successor(kept, 61.0)
    account = books.queue.capacity_shares.get_tenant("a")
    account.demand.decay(61.0)
    faded = run.books.queue.capacity_shares.get_tenant("a").demand
    assert account.demand.sizes == pytest.approx(faded.sizes, rel=0.01)


def test_of_too_many_tenants_those_that_wait_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is one message, which the broker bounds."""
    monkeypatch.setattr(checkpoint, "MAX_TENANTS", 3)
    run = Run({})
    for number in range(5):
        run.books.queue.charge(f"gone{number}", 1000 + number)
    for tenant in ("x", "y"):
        ask(run.books, tenant, 0.0)
    kept = checkpoint.capture(run.books, 0, 1.0)
    assert kept.tenants.keys() == {"x", "y", "gone4"}


@pytest.mark.parametrize("rate", [{}, {"sums": {}}, {"sums": {"pace": 1.0}, "charge": [1, 2]}])
def test_a_service_rate_of_another_release_is_refused(rate: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Checkpoint.unpack(messages.pack((1.0, 2, {}, rate or {"other": [1, 2]})))


def test_a_checkpoint_of_an_earlier_release_has_no_service_rate() -> None:
    assert Checkpoint.unpack(messages.pack((1.0, 2, {}))) == Checkpoint(1.0, 2, {})

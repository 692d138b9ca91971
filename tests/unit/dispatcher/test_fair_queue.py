"""The fair queue: shares, order, priorities, and that nothing is left of what has gone."""

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dispatcher.queueing.fair_queue import (
    AGING_SECONDS,
    MIN_TRICKLE_SECONDS,
    FairQueue,
    service_tokens,
)
from dispatcher.queueing.tenant_queues import STALE_ENTRIES_TOLERATED, QueuedRequest
from dispatcher.queueing.tenant_state import RunningMean
from streams.subjects import Priority

TENANTS = ("a", "b", "c")
VERSIONS = ("", "1", "2")
TRICKLE = 5.0
_SEQUENCE = itertools.count(1)


def queued(
    tenant: str,
    priority: Priority = Priority.STANDARD,
    *,
    prompt: int = 10,
    output: int = 10,
    deadline: float = 1e9,
    version: str = "",
) -> QueuedRequest:
    seq = next(_SEQUENCE)
    return QueuedRequest(
        request_id=f"r{seq}",
        tenant=tenant,
        priority=priority,
        prompt_tokens=prompt,
        cost=prompt + output,
        accepted=0,
        deadline=int(deadline * 1000),
        route="r",
        version=version,
        seq=seq,
        reply="",
    )


def expected_service(item: QueuedRequest) -> int:
    """What is charged while nothing is known of what requests generate: what it reserves."""
    return service_tokens(item.prompt_tokens, item.cost - item.prompt_tokens)


def taken(queue: FairQueue, now: float = 0.0) -> QueuedRequest:
    item = queue.peek(now)
    assert item
    queue.reserve(item, now, item.priority)
    return item


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=40, max_size=120))
def test_backlogged_tenants_get_service_by_their_weights(sizes: list[tuple[int, int]]) -> None:
    """Tenants pay for shares: at every moment the shares differ by less than a request."""
    queue = FairQueue()
    queue.set_weight("b", 3.0)
    for prompt, output in sizes:
        for tenant in ("a", "b"):
            queue.enqueue(queued(tenant, prompt=prompt, output=output), 0)
    largest = max(prompt + 2 * output for prompt, output in sizes)
    served: Counter[str] = Counter()
    while {tenant for tenant, _, _ in queue.tenant_queues()} == {"a", "b"}:
        item = taken(queue)
        served[item.tenant] += expected_service(item)
        assert abs(served["a"] - served["b"] / 3) <= largest


def test_a_tenant_that_returns_gets_no_credit_for_its_absence() -> None:
    """Else whoever saved up silence could shut out everybody who worked meanwhile."""
    queue = FairQueue()
    for _ in range(100):
        queue.enqueue(queued("busy"), 0)
    for _ in range(50):
        taken(queue)
    for _ in range(10):
        queue.enqueue(queued("back"), 0)
    assert Counter(taken(queue).tenant for _ in range(20)) == {"busy": 10, "back": 10}


def test_a_tenant_that_finds_an_empty_queue_gets_no_credit_either() -> None:
    """It starts level with whoever was served last, though nobody waits at that moment."""
    queue = FairQueue()
    for _ in range(50):
        queue.enqueue(queued("busy"), 0)
        taken(queue)
    queue.enqueue(queued("new"), 0)
    assert queue.counter("new") == queue.counter("busy")


def test_an_expensive_request_counts_for_more_than_a_cheap_one() -> None:
    """Fairness is in tokens, not in requests: a generated one costs two prompt tokens."""
    queue = FairQueue()
    for _ in range(100):
        queue.enqueue(queued("long", prompt=100, output=150), 0)
        queue.enqueue(queued("short", prompt=20, output=10), 0)
    served = Counter(taken(queue).tenant for _ in range(110))
    assert served["short"] == pytest.approx(10 * served["long"], rel=0.15)


def test_a_settled_request_is_charged_what_it_took() -> None:
    """Whoever reserves much and uses little gets the difference back."""
    queue = FairQueue()
    queue.enqueue(queued("a"), 0)
    reserved = expected_service(taken(queue))
    queue.charge("a", 12 - reserved)
    assert queue.counter("a") == 12


@given(st.lists(st.sampled_from(Priority), min_size=1, max_size=50))
def test_a_tenants_requests_of_one_priority_leave_in_order(priorities: list[Priority]) -> None:
    """A client that sends two requests expects the first to start first."""
    queue = FairQueue()
    items = [queued("a", priority) for priority in priorities]
    for item in items:
        queue.enqueue(item, 0)
    left = [taken(queue) for _ in items]
    for priority in Priority:
        of_priority = [item.seq for item in left if item.priority is priority]
        assert of_priority == sorted(of_priority)


def test_what_is_delivered_again_takes_its_old_place() -> None:
    """After a lost delivery the broker sends old requests behind younger ones."""
    queue = FairQueue()
    items = [queued("a") for _ in range(4)]
    for index in (0, 3, 1, 2):
        queue.enqueue(items[index], 0)
    assert [taken(queue) for _ in items] == items


def test_a_request_that_is_delivered_twice_is_queued_once() -> None:
    """A take-over, or a repair, has everything delivered again."""
    queue = FairQueue()
    item = queued("a")
    queue.enqueue(item, 0)
    queue.enqueue(item, 0)
    assert len(queue) == 1
    assert queue.count_queued(Priority.STANDARD) == (1, item.cost)


def test_a_higher_priority_overtakes_whoever_waits() -> None:
    """Somebody looks at a screen."""
    queue = FairQueue()
    queue.enqueue(queued("a", Priority.BATCH), 0)
    queue.enqueue(queued("b", Priority.STANDARD), 0)
    queue.enqueue(queued("a", Priority.INTERACTIVE), 0)
    order = [taken(queue).priority for _ in range(3)]
    assert order == [Priority.INTERACTIVE, Priority.STANDARD, Priority.BATCH]


def trickled(seconds: int) -> dict[Priority, list[float]]:
    """When each priority is served in a flood of interactive requests, ten a second."""
    queue = FairQueue(TRICKLE)
    for _ in range(10 * seconds + 1):
        for priority in Priority:
            queue.enqueue(queued("a", priority), 0)
    at: dict[Priority, list[float]] = {priority: [] for priority in Priority}
    for i in range(10 * seconds + 1):
        at[taken(queue, i / 10).priority].append(i / 10)
    return at


def test_a_lower_priority_trickles_through_a_flood() -> None:
    """Strict priorities alone would let a flood of urgent requests starve the others for ever."""
    at = trickled(20)
    for priority in (Priority.STANDARD, Priority.BATCH):
        times = at[priority]
        assert times[0] <= TRICKLE
        assert max(b - a for a, b in itertools.pairwise(times)) <= TRICKLE
        assert len(times) <= 20 / (TRICKLE / 2)


def test_the_longer_a_priority_waits_the_more_of_it_trickles_through() -> None:
    """Aging: who has waited for minutes is not as patient as who has just come; up to a bound."""
    times = trickled(600)[Priority.BATCH]
    first = sum(time < 60 for time in times)
    last = sum(time >= 540 for time in times)
    assert first < last <= 60 / MIN_TRICKLE_SECONDS


def test_who_was_overtaken_by_nobody_does_not_starve() -> None:
    """A fleet full of batch work serves no one; the next free place is the urgent request's."""
    queue = FairQueue(TRICKLE)
    for _ in range(2):
        queue.enqueue(queued("a", Priority.BATCH), 0)
    taken(queue)
    queue.enqueue(queued("b", Priority.INTERACTIVE), 100)
    assert taken(queue, 100).priority is Priority.INTERACTIVE


def test_a_request_is_charged_what_its_tenant_generates_as_a_rule() -> None:
    """Whoever always asks for the most and ends early is not to wait for its refunds."""
    queue = FairQueue()
    for _ in range(20):
        queue.learn_output_length("short", 5)
        queue.learn_output_length("long", 400)
    charged = {}
    for tenant in ("short", "long"):
        item = queued(tenant, prompt=10, output=100)
        queue.enqueue(item, 0)
        charged[tenant] = queue.reserve(item, 0, item.priority)
    assert charged["short"] < service_tokens(10, 100) / 2
    assert charged["long"] == service_tokens(10, 100)


def test_a_pinned_version_that_waits_holds_up_no_other() -> None:
    """A version without workers must not stop its model."""
    queue = FairQueue()
    queue.enqueue(pinned := queued("a", version="2"), 0)
    queue.enqueue(free := queued("a"), 0)
    assert list(queue.candidates(0)) == [pinned, free]


def test_what_has_expired_is_taken_out_once() -> None:
    """A late request is ended, never run."""
    queue = FairQueue()
    items = [queued("a", deadline=t) for t in (3, 1, 2, 9)]
    for item in items:
        queue.enqueue(item, 0)
    assert queue.pop_expired(2.0) == [items[1], items[2]]
    assert queue.pop_expired(2.0) == []
    assert len(queue) == 2


def test_a_storm_of_cancelled_requests_leaves_no_memory_behind() -> None:
    """Nobody takes anything out of a queue without workers, so removals must tidy up themselves."""
    queue = FairQueue()
    queue.enqueue(queued("first"), 0)
    for i in range(5000):
        item = queued(f"t{i % 7}", version=str(i % 3))
        queue.enqueue(item, 0)
        queue.charge("first", 1)
        queue.remove(item.request_id)
    assert entries(queue) < 20 * STALE_ENTRIES_TOLERATED


def entries(queue: FairQueue) -> int:
    """Everything that the queue keeps per request or per change."""
    lines = [line for lines in queue._version_queues.values() for line in lines.values()]
    waiting = sum(len(lane.items) for _, _, lane in queue.tenant_queues())
    orders = sum(len(order) for line in lines for order in line._heaps)
    return waiting + len(queue._deadlines) + orders


class Reference(RuleBasedStateMachine):
    """The same rules without any data structure: a list that is searched."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(TRICKLE)
        self.items: list[QueuedRequest] = []
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.weights = dict.fromkeys(TENANTS, 1.0)
        self.served = dict.fromkeys(Priority, 0.0)
        self.since = dict.fromkeys(Priority, 0.0)
        self.popped = dict.fromkeys(Priority, 0.0)
        self.last = "nobody"
        self.now = 0.0

    @rule(
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from(Priority),
        version=st.sampled_from(VERSIONS),
        prompt=st.integers(1, 50),
        patience=st.floats(0.1, 30),
    )
    def push(
        self, tenant: str, priority: Priority, version: str, prompt: int, patience: float
    ) -> None:
        item = queued(
            tenant, priority, prompt=prompt, deadline=self.now + patience, version=version
        )
        if all(other.tenant != tenant for other in self.items):
            waiting = [self.counters[other.tenant] for other in self.items]
            lowest = min(waiting, default=self.counters[self.last])
            self.counters[tenant] = max(self.counters[tenant], lowest)
        if all(other.priority is not priority for other in self.items):
            self.served[priority] = self.since[priority] = self.now
        self.items.append(item)
        self.queue.enqueue(item, self.now)

    @rule()
    def pop(self) -> None:
        order = self.order()
        if order:
            item = order[0]
            self.queue.reserve(item, self.now, item.priority)
            self.items.remove(item)
            self.served[item.priority] = self.popped[item.priority] = self.now
            self.last = item.tenant
            self.counters[item.tenant] += expected_service(item) / self.weights[item.tenant]

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.items:
            item = data.draw(st.sampled_from(self.items))
            assert self.queue.remove(item.request_id) is item
            assert self.queue.remove(item.request_id) is None
            self.items.remove(item)

    @rule(seconds=st.floats(0.1, 8))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        late = {item.request_id for item in self.items if item.deadline / 1000 <= self.now}
        assert {item.request_id for item in self.queue.pop_expired(self.now)} == late
        self.items = [item for item in self.items if item.request_id not in late]

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.integers(-30, 60))
    def charge(self, tenant: str, tokens: int) -> None:
        self.queue.charge(tenant, tokens)
        self.counters[tenant] += tokens / self.weights[tenant]

    @rule(tenant=st.sampled_from(TENANTS), weight=st.sampled_from([0.5, 1.0, 3.0]))
    def set_weight(self, tenant: str, weight: float) -> None:
        self.queue.set_weight(tenant, weight)
        self.weights[tenant] = weight

    def order(self) -> list[QueuedRequest]:
        heads: dict[tuple[Priority, str], QueuedRequest] = {}
        for item in sorted(self.items, key=self.place):
            heads.setdefault((item.priority, item.version), item)
        starving = [p for p in (Priority.BATCH, Priority.STANDARD) if self.starves(p)]
        urgency = starving + [p for p in Priority if p not in starving]
        return sorted(
            heads.values(),
            key=lambda i: (urgency.index(i.priority), self.counters[i.tenant], i.seq),
        )

    def place(self, item: QueuedRequest) -> tuple[float, str, int]:
        return self.counters[item.tenant], item.tenant, item.seq

    def starves(self, priority: Priority) -> bool:
        waits = any(item.priority is priority for item in self.items)
        above = [self.popped[p] for p in list(Priority)[: list(Priority).index(priority)]]
        overtaken = any(popped > self.served[priority] for popped in above)
        aging = 1 + (self.now - self.since[priority]) / AGING_SECONDS
        patience = min(TRICKLE, max(MIN_TRICKLE_SECONDS, TRICKLE / aging))
        return waits and overtaken and self.now - self.served[priority] >= patience

    @invariant()
    def agrees(self) -> None:
        assert list(self.queue.candidates(self.now)) == self.order()

    @invariant()
    def counts_what_is_there(self) -> None:
        assert len(self.queue) == len(self.items)
        for priority in Priority:
            costs = [item.cost for item in self.items if item.priority is priority]
            assert self.queue.count_queued(priority) == (len(costs), sum(costs))
        lanes = [(lane.queued, lane.tokens) for _, _, lane in self.queue.tenant_queues()]
        assert all(count > 0 for count, _ in lanes)
        assert sum(count for count, _ in lanes) == len(self.items)
        assert sum(tokens for _, tokens in lanes) == sum(item.cost for item in self.items)

    @invariant()
    def forgets_what_has_gone(self) -> None:
        assert entries(self.queue) <= 6 * len(self.items) + 12 * STALE_ENTRIES_TOLERATED


TestReference = Reference.TestCase
TestReference.settings = settings(max_examples=60, stateful_step_count=60)


def test_arrivals_are_counted_once_and_stay_counted() -> None:
    """Their rate is demand: what was served meanwhile was asked for, too."""
    queue = FairQueue()
    items = [queued("a", prompt=30, output=5), queued("b", prompt=1, output=2)]
    for item in (*items, items[0]):
        queue.enqueue(item, 0.0)
    taken(queue)
    assert queue.count_arrived(Priority.STANDARD) == (2, 31, 7)
    assert queue.count_arrived(Priority.BATCH) == (0, 0, 0)


def test_a_new_leader_counts_no_arrival_again() -> None:
    """It indexes all that its predecessor has left in the queue."""
    queue = FairQueue()
    queue.restore_baseline(1.0, RunningMean())
    queue.enqueue(queued("a"), 2.0)
    assert queue.count_arrived(Priority.STANDARD) == (0, 0, 0)

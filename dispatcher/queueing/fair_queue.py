"""The fair queue: requests per tenant and priority, popped so that tenants spend alike. Pure.

Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
tenant's counter grows by the service it got, prompt tokens + 2 * generated tokens over its weight,
and the tenant with the lowest counter is next. A request is charged what it is expected to take
when it is popped (less if it may have to stand aside), and corrected by what it has taken. A tenant
that returns gets no credit for its absence.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dispatcher.queueing.fair_share import FairShare
from dispatcher.queueing.tenant_queues import (
    STALE_ENTRIES_TOLERATED,
    QueuedRequest,
    TenantQueue,
    VersionQueue,
)
from dispatcher.queueing.tenant_state import RunningMean
from streams.subjects import Priority

OUTPUT_WEIGHT = 2  # a generated token costs about twice a prompt token (the paper's w_q)
DEFAULT_TRICKLE_SECONDS = 5.0
AGING_SECONDS = 60.0  # a priority that has waited for so long trickles twice as often
MIN_TRICKLE_SECONDS = 1.0  # and at most so often
PRIOR_REQUESTS = 4  # how many of its own a tenant's mean needs to outweigh the model's
PREEMPTIBLE_CHARGE_FRACTION = (
    1 / 2
)  # of what it is likely to generate is charged at once where it may stand aside first
MILLISECOND = 0.001
_PRIORITIES = tuple(Priority)


def service_tokens(prompt_tokens: int, generated_tokens: int) -> int:
    """The service of a request in virtual tokens."""
    return prompt_tokens + OUTPUT_WEIGHT * generated_tokens


def is_urgent(priority: Priority) -> bool:
    """Batch work fills what others leave."""
    return priority is not Priority.BATCH


@dataclass(slots=True)
class _PriorityState:
    """One priority over all tenants: since when it waits, was served (or began to wait), popped."""

    queued: int = 0
    tokens: int = 0
    waiting_since: float = 0.0
    served_at: float = 0.0
    popped_at: float = 0.0


class FairQueue:
    """Queue requests per tenant; pop them so that tenants spend alike.

    Priorities are strict, but a lower one that has been overtaken for `trickle_seconds` gets one
    request through, and more often the longer it waits. Requests that pin a version wait in lines
    of their own, so that a version without room holds up nobody else; the counters are shared.
    Times are epoch seconds, given by the caller. `push`, `pop` and `remove` cost O(log tenants).
    """

    def __init__(self, trickle_seconds: float = DEFAULT_TRICKLE_SECONDS) -> None:
        self.fair_share = FairShare()
        self._trickle_seconds = trickle_seconds
        self._mean_output = RunningMean()  # tokens of a request, whoever's
        self._priorities = {priority: _PriorityState() for priority in Priority}
        self._version_queues: dict[Priority, dict[str, VersionQueue]] = {
            priority: {} for priority in Priority
        }
        self._items: dict[str, QueuedRequest] = {}
        self._deadlines: list[tuple[int, str]] = []  # a heap, with entries of what is gone
        self._last_served_tenant = ""  # the tenant that was served last
        self._restored_at = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, request_id: str) -> QueuedRequest | None:
        return self._items.get(request_id)

    def weight(self, tenant: str) -> float:
        return self.fair_share.get_tenant(tenant).weight

    def enqueue(self, item: QueuedRequest, now: float) -> None:
        """Queue an item; one that is queued already is ignored."""
        if item.request_id in self._items:
            return
        account = self.fair_share.get_tenant(item.tenant)
        is_new = item.accepted * MILLISECOND >= self._restored_at
        if is_new and not account.queued_requests:
            account.counter = max(account.counter, self.lowest_counter())
        backlog = self._priorities[item.priority]
        if not backlog.queued:
            backlog.waiting_since = backlog.served_at = now
        self._version_queue(item).enqueue(item)
        self._items[item.request_id] = item
        heapq.heappush(self._deadlines, (item.deadline, item.request_id))
        self._adjust_counts(item, +1)
        if is_urgent(item.priority):
            self.fair_share.enqueue(item.tenant, item.cost, now)
            if is_new:
                self.fair_share.record_demand(item.tenant, item.cost, now)
            self._reclassify(item.tenant)

    def candidates(self, now: float) -> Iterator[QueuedRequest]:
        """Whoever may be next: by priority, then by the counter of the tenant.

        Of each line the first item of the calm, of the heavy, and of each tenant that has capacity
        reserved and does not use it. Whoever takes one, or lets one wait, decides; the queue may
        change meanwhile.
        """
        claimants = self.fair_share.tenants_with_unused_reservation
        for priority in self._by_urgency(now):
            heads = [
                head for line in self._version_queues[priority].values() for head in line.heads()
            ]
            heads += [head for head in self._heads(priority, claimants) if head not in heads]
            if len(heads) > 1:
                heads.sort(key=lambda item: (self.counter(item.tenant), item.seq))
            yield from heads

    def _heads(self, priority: Priority, tenants: Sequence[str]) -> Iterator[QueuedRequest]:
        for line in self._version_queues[priority].values() if tenants else ():
            yield from (
                line.by_tenant[tenant].head for tenant in tenants if tenant in line.by_tenant
            )

    def peek(self, now: float) -> QueuedRequest | None:
        """The item that is next, which stays queued."""
        return next(self.candidates(now), None)

    def reserve(self, item: QueuedRequest, now: float, lane: Priority) -> int:
        """Take out an item that was a candidate, and charge its tenant; says how much."""
        self._remove_item(item)
        backlog = self._priorities[item.priority]
        backlog.served_at = backlog.popped_at = now
        self._last_served_tenant = item.tenant
        return self.charge_in_flight(
            item.tenant, item.priority, lane, item.prompt_tokens, item.cost
        )

    def charge_in_flight(
        self, tenant: str, priority: Priority, lane: Priority, prompt_tokens: int, cost: int
    ) -> int:
        """A request is in flight: charge what it is expected to take; says how much.

        In a `lane` below its priority it may stand aside for long: half of its answer is charged
        until it has more.
        """
        if is_urgent(priority):
            self.fair_share.reserve(tenant, cost)
        else:
            self.fair_share.reserve_batch(cost)
        expected = self._expected_output(tenant, cost - prompt_tokens)
        if lane is not priority:
            expected = round(PREEMPTIBLE_CHARGE_FRACTION * expected)
        charged = service_tokens(prompt_tokens, expected)
        self.charge(tenant, charged)
        return charged

    def release(self, tenant: str, priority: Priority, cost: int) -> None:
        """It is in flight no more."""
        if is_urgent(priority):
            self.fair_share.release(tenant, cost)
            self._reclassify(tenant)
        else:
            self.fair_share.release_batch(cost)

    def learn_output_length(self, tenant: str, generated_tokens: int) -> None:
        """A request of a tenant has ended after so many tokens; later ones may be like it."""
        self.fair_share.get_tenant(tenant).mean_output.add(generated_tokens)
        self._mean_output.add(generated_tokens)

    def remove(self, request_id: str) -> QueuedRequest | None:
        """Take out an item that is not to be run; nothing is charged."""
        item = self._items.get(request_id)
        if item:
            self._remove_item(item)
            self._reclassify(item.tenant)
        return item

    def pop_expired(self, now: float) -> list[QueuedRequest]:
        """Take out every item whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] * MILLISECOND <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if item := self.remove(request_id):
                late.append(item)
        return late

    def charge(self, tenant: str, virtual_tokens: float) -> None:
        """Add service to a tenant's counter, or correct it (a negative amount)."""
        account = self.fair_share.get_tenant(tenant)
        account.counter += virtual_tokens / account.weight
        self._reorder(tenant)

    def set_weight(self, tenant: str, weight: float) -> None:
        self.fair_share.set_weight(tenant, weight)

    def restore_baseline(self, at: float, generated: RunningMean) -> None:
        """The counters are those of an earlier leader at a time, with all that it knew of.

        So a tenant whose request was accepted before has waited since, and does not return.
        `generated` are the tokens of a request, whoever's.
        """
        self._restored_at, self._mean_output = at, generated

    def set_reserved_tokens(self, tokens: Mapping[str, int]) -> None:
        """Keep room for so many tokens in flight of tenants' urgent requests; others have none."""
        self.fair_share.set_reserved_tokens(tokens)

    def is_starving(self, priority: Priority, now: float) -> bool:
        """Whether a priority has been overtaken for so long that one request of it is due."""
        backlog = self._priorities[priority]
        if not backlog.queued or now - backlog.served_at < min(
            self._trickle_seconds, MIN_TRICKLE_SECONDS
        ):
            return False
        aging = 1 + max(0.0, now - backlog.waiting_since) / AGING_SECONDS
        patience = min(
            self._trickle_seconds, max(MIN_TRICKLE_SECONDS, self._trickle_seconds / aging)
        )
        above = (b for p, b in self._priorities.items() if p.is_above(priority))
        overtaken = any(other.popped_at > backlog.served_at for other in above)
        return overtaken and now - backlog.served_at >= patience

    def count_queued(self, priority: Priority) -> tuple[int, int]:
        """Requests and reserved tokens of one priority."""
        return self._priorities[priority].queued, self._priorities[priority].tokens

    def tenant_queues(self) -> Iterator[tuple[str, Priority, TenantQueue]]:
        """Every lane that is not empty, with its tenant; pinned versions have their own."""
        for priority, lines in self._version_queues.items():
            for line in lines.values():
                for tenant, lane in line.by_tenant.items():
                    yield tenant, priority, lane

    @property
    def oldest(self) -> QueuedRequest | None:
        """The item that has been in REQUESTS for longest; it looks at every lane."""
        heads = (lane.head for _, _, lane in self.tenant_queues())
        return min(heads, key=lambda item: item.seq, default=None)

    def counter(self, tenant: str) -> float:
        """The service that a tenant got, over its weight."""
        account = self.fair_share.tenants.get(tenant)
        return account.counter if account else 0.0

    def lowest_counter(self) -> float:
        """The lowest counter of the tenants that wait now, else that of the one served last."""
        return min(self._counters(_PRIORITIES), default=self.counter(self._last_served_tenant))

    def _counters(self, priorities: Iterable[Priority]) -> Iterator[float]:
        """The lowest counters of each line, of the calm and of the heavy."""
        for line in (
            line for priority in priorities for line in self._version_queues[priority].values()
        ):
            yield from (self.counter(head.tenant) for head in line.heads())

    def _version_queue(self, item: QueuedRequest) -> VersionQueue:
        lines = self._version_queues[item.priority]
        if (line := lines.get(item.version)) is None:
            line = lines[item.version] = VersionQueue(self.fair_share.tenants)
        return line

    def _expected_output(self, tenant: str, most: int) -> int:
        """Tokens that a request is likely to generate: as its tenant's, or the model's, did."""
        if not self._mean_output.count:
            return most
        own = self.fair_share.get_tenant(tenant).mean_output
        known = own.count * own.value + PRIOR_REQUESTS * self._mean_output.value
        return min(most, round(known / (own.count + PRIOR_REQUESTS)))

    def _by_urgency(self, now: float) -> list[Priority]:
        starving = [priority for priority in _PRIORITIES if self.is_starving(priority, now)]
        return [*reversed(starving), *(p for p in _PRIORITIES if p not in starving)]

    def _reclassify(self, tenant: str) -> None:
        if self.fair_share.reclassify(tenant, partial(self._counter_lead, tenant)):
            self._reorder(tenant)

    def _counter_lead(self, tenant: str) -> float:
        """A tenant's counter less the lowest of those whose urgent requests wait."""
        own = self.counter(tenant)
        return own - min(self._counters(filter(is_urgent, _PRIORITIES)), default=own)

    def _reorder(self, tenant: str) -> None:
        if self.fair_share.get_tenant(tenant).queued_requests:
            for lines in self._version_queues.values():
                for line in lines.values():
                    line.reorder(tenant)

    def _remove_item(self, item: QueuedRequest) -> None:
        del self._items[item.request_id]
        lines = self._version_queues[item.priority]
        lines[item.version].remove(item)
        if not lines[item.version].by_tenant:
            del lines[item.version]
        self._adjust_counts(item, -1)
        if is_urgent(item.priority):
            self.fair_share.dequeue(item.tenant, item.cost)
        if len(self._deadlines) > 2 * len(self._items) + STALE_ENTRIES_TOLERATED:
            self._deadlines = [(item.deadline, name) for name, item in self._items.items()]
            heapq.heapify(self._deadlines)

    def _adjust_counts(self, item: QueuedRequest, sign: int) -> None:
        backlog = self._priorities[item.priority]
        backlog.queued += sign
        backlog.tokens += sign * item.cost
        self.fair_share.get_tenant(item.tenant).queued_requests += sign

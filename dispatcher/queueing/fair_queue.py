"""The fair queue: requests by tenant and priority, served so that tenants get equal service. Pure.

Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
tenant's counter grows by the service it got, prompt tokens + 2 * generated tokens over its weight,
and the tenant with the lowest counter is next. A request is charged its expected service when it is
reserved (less if it may be preempted), and the charge is corrected to what it really took. A tenant
that returns gets no credit for its absence.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dispatcher.queueing.capacity_shares import CapacityShares
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
AGING_SECONDS = 60.0  # a priority that has waited for this long trickles twice as often
MIN_TRICKLE_SECONDS = 1.0  # between two trickles, however long the wait
PRIOR_REQUESTS = 4  # the model's mean counts as so many requests beside the tenant's own
# Of its expected output a request is charged this much at once where it may be preempted first
PREEMPTIBLE_CHARGE_FRACTION = 1 / 2
MILLISECOND = 0.001
_PRIORITIES = tuple(Priority)


def service_tokens(prompt_tokens: int, generated_tokens: int) -> int:
    """Return the service that a request takes, in virtual tokens: prompt + 2 * generated tokens."""
    return prompt_tokens + OUTPUT_WEIGHT * generated_tokens


def is_urgent(priority: Priority) -> bool:
    """Return True for every priority but batch, which only fills what the others leave."""
    return priority is not Priority.BATCH


@dataclass(slots=True)
class _PriorityState:
    """Counts and times of one priority over all tenants: queued requests, waiting, serving.

    `waiting_since` is when it began to wait; `served_at` when it last was served, or began to wait;
    `popped_at` when it last was served.
    """

    queued: int = 0
    tokens: int = 0
    waiting_since: float = 0.0
    served_at: float = 0.0
    popped_at: float = 0.0


class FairQueue:
    """All queued requests of one model, given out so that tenants receive equal service by weight.

    The model's leader owns it. A tenant's counter is its service so far (in virtual tokens) over
    its weight; within a priority the tenant with the lowest counter is next. Priorities are strict,
    but a lower one that more urgent ones have overtaken for `trickle_seconds` gets one request
    through, and more often the longer it waits. Requests that pin a model version wait in queues of
    their own, so that a version without capacity holds up no other; the counters are shared. Times
    are epoch seconds, given by the caller. `enqueue`, `reserve` and `remove` cost O(log tenants).
    """

    def __init__(self, trickle_seconds: float = DEFAULT_TRICKLE_SECONDS) -> None:
        self.capacity_shares = CapacityShares()
        self._trickle_seconds = trickle_seconds
        self._mean_output = RunningMean()  # generated per request, over all tenants
        self._priorities = {priority: _PriorityState() for priority in Priority}
        self._version_queues: dict[Priority, dict[str, VersionQueue]] = {
            priority: {} for priority in Priority
        }
        self._items: dict[str, QueuedRequest] = {}
        self._deadlines: list[tuple[int, str]] = []  # a heap; removed requests leave stale entries
        self._last_served_tenant = ""
        self._restored_at = 0.0
        self._arrived = dict.fromkeys(Priority, (0, 0, 0))

    def __len__(self) -> int:
        return len(self._items)

    def get(self, request_id: str) -> QueuedRequest | None:
        """Return the queued request with this id; None if there is none."""
        return self._items.get(request_id)

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight, to which its share of service is proportional; 1 by default."""
        return self.capacity_shares.get_tenant(tenant).weight

    def enqueue(self, item: QueuedRequest, now: float) -> None:
        """Add a request; ignored if a request with its id is queued already.

        A tenant that had nothing queued is lifted to the lowest counter of the tenants that wait,
        so that it gets no credit for its absence. It is not lifted if the request was accepted
        before the restored checkpoint was taken: then the tenant has waited since.
        """
        if item.request_id in self._items:
            return
        state = self.capacity_shares.get_tenant(item.tenant)
        is_new = item.accepted * MILLISECOND >= self._restored_at
        if is_new:
            self._count_arrival(item)
        if is_new and not state.queued_requests:
            state.counter = max(state.counter, self.lowest_counter())
        priority_state = self._priorities[item.priority]
        if not priority_state.queued:
            priority_state.waiting_since = priority_state.served_at = now
        self._version_queue(item).enqueue(item)
        self._items[item.request_id] = item
        heapq.heappush(self._deadlines, (item.deadline, item.request_id))
        self._adjust_counts(item, +1)
        if is_urgent(item.priority):
            self.capacity_shares.enqueue(item.tenant, item.cost, now)
            if is_new:
                self.capacity_shares.record_demand(item.tenant, item.cost, now)
            self._reclassify(item.tenant)

    def _count_arrival(self, item: QueuedRequest) -> None:
        requests, prompt, output = self._arrived[item.priority]
        most = item.cost - item.prompt_tokens
        self._arrived[item.priority] = requests + 1, prompt + item.prompt_tokens, output + most

    def count_arrived(self, priority: Priority) -> tuple[int, int, int]:
        """Return how many requests were ever enqueued, their prompt tokens, and their most output.

        Those that a restored checkpoint knew of are left out: an earlier leader has counted them.
        """
        return self._arrived[priority]

    def candidates(self, now: float) -> Iterator[QueuedRequest]:
        """Yield the queued requests that may be dispatched next, best first; none is removed.

        They come by priority, then by their tenants' counters. For each priority and wanted
        version they are: the first request of the tenants below their fair share, the first of
        those above it, and the first of each tenant that does not use all capacity reserved for it.
        The caller passes one of them to `reserve`, or skips it. The queue may change meanwhile.
        """
        claimants = self.capacity_shares.tenants_with_unused_reservation
        for priority in self._by_urgency(now):
            heads = [
                head
                for version_queue in self._version_queues[priority].values()
                for head in version_queue.heads()
            ]
            heads += [head for head in self._heads(priority, claimants) if head not in heads]
            if len(heads) > 1:
                heads.sort(key=lambda item: (self.counter(item.tenant), item.seq))
            yield from heads

    def _heads(self, priority: Priority, tenants: Sequence[str]) -> Iterator[QueuedRequest]:
        for version_queue in self._version_queues[priority].values() if tenants else ():
            yield from (
                version_queue.by_tenant[tenant].head
                for tenant in tenants
                if tenant in version_queue.by_tenant
            )

    def peek(self, now: float) -> QueuedRequest | None:
        """Return the first of `candidates`, which stays queued; None if nothing is queued."""
        return next(self.candidates(now), None)

    def reserve(self, item: QueuedRequest, now: float, work_priority: Priority) -> int:
        """Remove a candidate from the queue to dispatch it, and charge its tenant.

        Returns the virtual tokens charged: the service that is expected of the request.
        `work_priority` is the priority at which workers will run it. Raises KeyError if the request
        is not queued.
        """
        self._remove_item(item)
        priority_state = self._priorities[item.priority]
        priority_state.served_at = priority_state.popped_at = now
        self._last_served_tenant = item.tenant
        return self.charge_in_flight(
            item.tenant, item.priority, work_priority, item.prompt_tokens, item.cost
        )

    def charge_in_flight(
        self,
        tenant: str,
        priority: Priority,
        work_priority: Priority,
        prompt_tokens: int,
        cost: int,
    ) -> int:
        """Count a request as in flight, charge its tenant, and return the virtual tokens charged.

        In flight is a request that was dispatched to the workers and has not ended. The charge is
        its prompt tokens plus twice the output expected of it, from the tenant's ended requests and
        at most `cost - prompt_tokens`. If `work_priority`, at which workers run it, is below its
        `priority`, workers may preempt it for long: then only half of the expected output is
        charged at first.
        """
        if is_urgent(priority):
            self.capacity_shares.reserve(tenant, cost)
        else:
            self.capacity_shares.reserve_batch(cost)
        most, mean = cost - prompt_tokens, self.mean_output(tenant)
        expected = most if mean is None else min(most, round(mean))
        if work_priority is not priority:
            expected = round(PREEMPTIBLE_CHARGE_FRACTION * expected)
        charged = service_tokens(prompt_tokens, expected)
        self.charge(tenant, charged)
        return charged

    def release(self, tenant: str, priority: Priority, cost: int) -> None:
        """Stop counting a request as in flight (dispatched, not ended): it has ended or never ran.

        `cost` is its reserved tokens. Its tenant's charge is left as it is; `charge` corrects that.
        """
        if is_urgent(priority):
            self.capacity_shares.release(tenant, cost)
            self._reclassify(tenant)
        else:
            self.capacity_shares.release_batch(cost)

    def learn_output_length(self, tenant: str, generated_tokens: int) -> None:
        """Learn how many tokens a tenant's ended request generated, to predict the next ones."""
        self.capacity_shares.get_tenant(tenant).mean_output.add(generated_tokens)
        self._mean_output.add(generated_tokens)

    def mean_output(self, tenant: str) -> float | None:
        """Return the mean number of tokens that a tenant's requests generate.

        For a tenant with few ended requests, those of the whole model count, too. None before any
        request of the model has ended.
        """
        if not self._mean_output.count:
            return None
        own = self.capacity_shares.get_tenant(tenant).mean_output
        known = own.count * own.value + PRIOR_REQUESTS * self._mean_output.value
        return known / (own.count + PRIOR_REQUESTS)

    def remove(self, request_id: str) -> QueuedRequest | None:
        """Remove a request that will not be run and return it; None if no such id is queued.

        Its tenant is not charged.
        """
        item = self._items.get(request_id)
        if item:
            self._remove_item(item)
            self._reclassify(item.tenant)
        return item

    def pop_before(self, seq: int) -> list[QueuedRequest]:
        """Remove and return the requests whose sequence in the stream REQUESTS is below `seq`.

        Their tenants are not charged. An empty list if there are none.
        """
        found = [item for item in self._items.values() if item.seq < seq]
        for item in found:
            self.remove(item.request_id)
        return found

    @property
    def earliest_deadline(self) -> int:
        """The earliest deadline of a queued request, in epoch milliseconds; 0 if none is queued."""
        while self._deadlines and self._deadlines[0][1] not in self._items:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else 0

    def pop_expired(self, now: float) -> list[QueuedRequest]:
        """Remove and return the requests whose deadline is not after `now`; an empty list if none.

        Their tenants are not charged.
        """
        expired = []
        while self._deadlines and self._deadlines[0][0] * MILLISECOND <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if item := self.remove(request_id):
                expired.append(item)
        return expired

    def charge(self, tenant: str, virtual_tokens: float) -> None:
        """Add virtual tokens, divided by the tenant's weight, to its counter.

        A negative amount takes back a part of an earlier charge.
        """
        state = self.capacity_shares.get_tenant(tenant)
        state.counter += virtual_tokens / state.weight
        self._reorder(tenant)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Set a tenant's weight (above 0), by which later charges to it are divided."""
        self.capacity_shares.set_weight(tenant, weight)

    def restore_baseline(self, at: float, mean_output: RunningMean) -> None:
        """Record that the counters come from an earlier leader's checkpoint, taken at `at`.

        To be called once they are set, before the first `enqueue`, which lifts the counter of a
        tenant that comes back to those of the others. A tenant whose request was accepted before
        `at` (epoch seconds) has waited since: its counter stays. `mean_output` is the mean of
        generated tokens per request over all tenants; it predicts the output of new ones.
        """
        self._restored_at, self._mean_output = at, mean_output

    def set_reserved_tokens(self, tokens: Mapping[str, int]) -> None:
        """Set how many KV tokens are kept free for each tenant's urgent (not batch) requests.

        `tokens` replaces all that was set before: tenants that are not named have none.
        """
        self.capacity_shares.set_reserved_tokens(tokens)

    def required_headroom(
        self, tenant: str, priority: Priority, cost: int, preempts_batch: bool
    ) -> float:
        """Return the fraction of the fleet that this request must leave free for other tenants.

        `cost` is its reserved tokens, and `preempts_batch` True where engines preempt batch work
        for more urgent work. -inf if nothing has to stay free.
        """
        if is_urgent(priority):
            return self.capacity_shares.required_headroom(tenant, cost, preempts_batch)
        return self.capacity_shares.required_headroom_for_batch(tenant, cost, preempts_batch)

    def is_starving(self, priority: Priority, now: float) -> bool:
        """Return True if a priority was overtaken for so long that one request of it is due next.

        That is so if it has a queued request, more urgent requests were dispatched since the last
        one of this priority, and that one was dispatched at least `trickle_seconds` ago. The longer
        the priority has waited, the fewer seconds are needed. `now` is epoch seconds.
        """
        priority_state = self._priorities[priority]
        if not priority_state.queued or now - priority_state.served_at < min(
            self._trickle_seconds, MIN_TRICKLE_SECONDS
        ):
            return False
        aging = 1 + max(0.0, now - priority_state.waiting_since) / AGING_SECONDS
        due_after = min(
            self._trickle_seconds, max(MIN_TRICKLE_SECONDS, self._trickle_seconds / aging)
        )
        more_urgent = (b for p, b in self._priorities.items() if p.is_above(priority))
        overtaken = any(other.popped_at > priority_state.served_at for other in more_urgent)
        return overtaken and now - priority_state.served_at >= due_after

    def count_queued(self, priority: Priority) -> tuple[int, int]:
        """Return how many requests of a priority are queued, and how many tokens they reserve.

        A request reserves its prompt tokens plus the most that it may generate.
        """
        return self._priorities[priority].queued, self._priorities[priority].tokens

    def tenant_queues(self) -> Iterator[tuple[str, Priority, TenantQueue]]:
        """Yield the tenant, the priority and the queue itself of every queue that is not empty.

        A tenant has a queue for each priority and wanted version.
        """
        for priority, version_queues in self._version_queues.items():
            for version_queue in version_queues.values():
                for tenant, tenant_queue in version_queue.by_tenant.items():
                    yield tenant, priority, tenant_queue

    @property
    def oldest(self) -> QueuedRequest | None:
        """The queued request with the lowest sequence in the stream REQUESTS.

        None if nothing is queued. Looks at every tenant's queues.
        """
        heads = (tenant_queue.head for _, _, tenant_queue in self.tenant_queues())
        return min(heads, key=lambda item: item.seq, default=None)

    def counter(self, tenant: str) -> float:
        """Return a tenant's service so far over its weight, in virtual tokens; 0 if unknown."""
        state = self.capacity_shares.tenants.get(tenant)
        return state.counter if state else 0.0

    def lowest_counter(self) -> float:
        """Return the lowest counter (service over weight) of the tenants with queued requests.

        If nothing is queued, return the counter of the tenant served last; 0 if there was none.
        """
        return min(self._counters(_PRIORITIES), default=self.counter(self._last_served_tenant))

    def _counters(self, priorities: Iterable[Priority]) -> Iterator[float]:
        """Yield the lowest counter of each version queue, below and above the fair share."""
        for version_queue in (
            version_queue
            for priority in priorities
            for version_queue in self._version_queues[priority].values()
        ):
            yield from (self.counter(head.tenant) for head in version_queue.heads())

    def _version_queue(self, item: QueuedRequest) -> VersionQueue:
        version_queues = self._version_queues[item.priority]
        if (version_queue := version_queues.get(item.wanted_version)) is None:
            version_queue = version_queues[item.wanted_version] = VersionQueue(
                self.capacity_shares.tenants
            )
        return version_queue

    def _by_urgency(self, now: float) -> list[Priority]:
        """All priorities in serving order: the starving ones, lowest first, then the others."""
        starving = [priority for priority in _PRIORITIES if self.is_starving(priority, now)]
        return [*reversed(starving), *(p for p in _PRIORITIES if p not in starving)]

    def _reclassify(self, tenant: str) -> None:
        if self.capacity_shares.reclassify(tenant, partial(self._counter_lead, tenant)):
            self._reorder(tenant)

    def _counter_lead(self, tenant: str) -> float:
        """A tenant's counter less the lowest of those whose urgent requests wait."""
        own = self.counter(tenant)
        return own - min(self._counters(filter(is_urgent, _PRIORITIES)), default=own)

    def _reorder(self, tenant: str) -> None:
        if self.capacity_shares.get_tenant(tenant).queued_requests:
            for version_queues in self._version_queues.values():
                for version_queue in version_queues.values():
                    version_queue.reorder(tenant)

    def _remove_item(self, item: QueuedRequest) -> None:
        del self._items[item.request_id]
        version_queues = self._version_queues[item.priority]
        version_queues[item.wanted_version].remove(item)
        if not version_queues[item.wanted_version].by_tenant:
            del version_queues[item.wanted_version]
        self._adjust_counts(item, -1)
        if is_urgent(item.priority):
            self.capacity_shares.dequeue(item.tenant, item.cost)
        if len(self._deadlines) > 2 * len(self._items) + STALE_ENTRIES_TOLERATED:
            self._deadlines = [(item.deadline, name) for name, item in self._items.items()]
            heapq.heapify(self._deadlines)

    def _adjust_counts(self, item: QueuedRequest, sign: int) -> None:
        priority_state = self._priorities[item.priority]
        priority_state.queued += sign
        priority_state.tokens += sign * item.cost
        self.capacity_shares.get_tenant(item.tenant).queued_requests += sign

"""Queued requests, grouped by priority, wanted version and tenant. Pure.

A `VersionQueue` holds the tenants' queues of one priority and one wanted version, and finds the
tenant that is next in it.
"""

import heapq
from bisect import bisect
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dispatcher.queueing.tenant_state import TenantState
from streams.headers import AnswerRef, Envelope, ItemRef
from streams.messages import Encoding
from streams.subjects import Priority

_Entry = tuple[float, str]  # a tenant's counter and its name
STALE_ENTRIES_TOLERATED = 64  # fewer stale entries are not worth a clean-up


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One queued request, reduced to what is needed to order, dispatch or end it.

    `seq` and `reply` are its sequence and its acknowledgement subject in the stream REQUESTS.
    `cost` is its reserved tokens: the prompt plus the most that it may generate. `route` says where
    its replies go, and `account` where its use is counted. `goal_ms`, `key`, `user`, `price`,
    `item`, `answer` and `encoding` are those of its headers.
    """

    request_id: str
    tenant: str
    priority: Priority
    prompt_tokens: int
    cost: int
    accepted: int  # epoch ms
    deadline: int  # epoch ms
    route: str
    version: str  # pinned; "": none
    seq: int
    reply: str
    is_removed: bool = False
    adapter: str = ""
    account: str = ""
    goal_ms: int | None = None
    key: str = ""
    user: str = ""
    price: str = ""
    item: ItemRef | None = None
    answer: AnswerRef | None = None
    encoding: Encoding = "msgpack"
    tokenized_for: str = ""  # the version whose tokens its prompt has; "": nobody says so

    @property
    def wanted_version(self) -> str:
        """The version that serves it unless the default takes its prompt, too; "": the default."""
        return self.version or self.tokenized_for

    @property
    def envelope(self) -> Envelope:
        """The header fields of the request that are needed to write its end and its bill."""
        return Envelope(
            self.request_id,
            self.tenant,
            self.route,
            self.cost,
            self.prompt_tokens,
            self.deadline,
            self.accepted,
            adapter=self.adapter,
            account=self.account,
            priority=self.priority.value,
            goal_ms=self.goal_ms,
            key=self.key,
            user=self.user,
            price=self.price,
            item=self.item,
            answer=self.answer,
            encoding=self.encoding,
        )


@dataclass(slots=True)
class TenantQueue:
    """A tenant's queued requests of one priority and one wanted version, oldest first.

    Removed requests stay in `items` for a while, marked by `is_removed`. `queued` and `tokens`
    count the others: requests, and the tokens that they reserve.
    """

    items: deque[QueuedRequest] = field(default_factory=deque)
    queued: int = 0
    tokens: int = 0

    @property
    def head(self) -> QueuedRequest:
        """The oldest request. Raises IndexError if none is left; the owner drops empty queues."""
        while self.items[0].is_removed:
            self.items.popleft()
        return self.items[0]

    def enqueue(self, item: QueuedRequest) -> None:
        """Insert a request in the order of `seq`; a redelivered one may be older than others."""
        if self.items and item.seq < self.items[-1].seq:  # redelivered after younger ones
            self.items.insert(bisect(self.items, item.seq, key=_sequence), item)
        else:
            self.items.append(item)
        self.queued += 1
        self.tokens += item.cost

    def remove(self, item: QueuedRequest) -> None:
        """Mark a request of this queue as removed and stop counting it; call it once for each.

        `items` is cleaned up when most of it is marked.
        """
        item.is_removed = True
        self.queued -= 1
        self.tokens -= item.cost
        if len(self.items) > 2 * self.queued + STALE_ENTRIES_TOLERATED:
            self.items = deque(item for item in self.items if not item.is_removed)


def _sequence(item: QueuedRequest) -> int:
    return item.seq


class VersionQueue:
    """The queued requests of one priority and one wanted version, by tenant.

    The tenant with the lowest counter (service so far over weight) is next. Tenants below and above
    their fair share are ordered apart, since those above it may have to wait when the others need
    not. `tenants` are the states of all of the model's tenants; their owner calls `reorder` when
    one has changed. Each order is a heap of counters and tenants. An entry is stale when it differs
    from the tenant's state: stale entries are skipped at the top, and their number is bounded.
    """

    __slots__ = ("_heaps", "_tenants", "by_tenant")

    def __init__(self, tenants: Mapping[str, TenantState]) -> None:
        self.by_tenant: dict[str, TenantQueue] = {}
        self._tenants = tenants
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])  # by `is_above_share`

    def enqueue(self, item: QueuedRequest) -> None:
        """Add a request to its tenant's queue, which is made if there is none."""
        tenant_queue = self.by_tenant.get(item.tenant)
        if tenant_queue is None:
            tenant_queue = self.by_tenant[item.tenant] = TenantQueue()
            self.reorder(item.tenant)
        tenant_queue.enqueue(item)

    def reorder(self, tenant: str) -> None:
        """Update a tenant's place after its counter, or its side of the fair share, has changed.

        Ignored for a tenant that has no request here.
        """
        if tenant in self.by_tenant:
            state = self._tenants[tenant]
            heapq.heappush(self._heaps[state.is_above_share], (state.counter, tenant))
            self._trim(state.is_above_share)

    def heads(self) -> list[QueuedRequest]:
        """Return the next request of tenants below their fair share, then that of those above it.

        The list has no entry for a side without requests. None is removed.
        """
        return [head for is_above_share in (False, True) if (head := self._head(is_above_share))]

    def _head(self, is_above_share: bool) -> QueuedRequest | None:
        heap = self._heaps[is_above_share]
        while heap:
            entry = heap[0]
            if entry[1] in self.by_tenant and entry == self._entry(entry[1], is_above_share):
                return self.by_tenant[entry[1]].head
            heapq.heappop(heap)
        return None

    def remove(self, item: QueuedRequest) -> None:
        """Remove a queued request, wherever it stands in its tenant's queue.

        Raises KeyError if its tenant has no request here.
        """
        tenant_queue = self.by_tenant[item.tenant]
        tenant_queue.remove(item)
        if not tenant_queue.queued:
            del self.by_tenant[item.tenant]

    def _entry(self, tenant: str, is_above_share: bool) -> _Entry | None:
        """A tenant's current entry in one of the heaps; None if it belongs in the other."""
        state = self._tenants[tenant]
        return (state.counter, tenant) if state.is_above_share == is_above_share else None

    def _trim(self, is_above_share: bool) -> None:
        """Rebuild a heap when it has more than twice as many entries as there are tenants."""
        if len(self._heaps[is_above_share]) > 2 * len(self.by_tenant) + STALE_ENTRIES_TOLERATED:
            entries = (self._entry(tenant, is_above_share) for tenant in self.by_tenant)
            self._heaps[is_above_share][:] = sorted(entry for entry in entries if entry)

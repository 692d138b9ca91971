"""Lines of waiting requests: lanes by tenant, and which tenant of a line is next. Pure."""

import heapq
from bisect import bisect
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dispatcher.queueing.tenant_state import TenantState
from streams.headers import Envelope
from streams.subjects import Priority

_Entry = tuple[float, str]  # a tenant's counter, and its name
STALE_ENTRIES_TOLERATED = 64  # stale entries that are not worth a search


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """What is kept of one queued request; `seq` and `reply` are its place in REQUESTS."""

    request_id: str
    tenant: str
    priority: Priority
    prompt_tokens: int
    cost: int
    accepted: int  # epoch ms
    deadline: int  # epoch ms
    route: str
    version: str  # "": the model's default
    seq: int
    reply: str
    is_removed: bool = False
    adapter: str = ""
    account: str = ""

    @property
    def envelope(self) -> Envelope:
        """What is needed of its headers to end it."""
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
        )


@dataclass(slots=True)
class TenantQueue:
    """One tenant's requests of one line, oldest first; those that are gone are skipped."""

    items: deque[QueuedRequest] = field(default_factory=deque)
    queued: int = 0
    tokens: int = 0

    @property
    def head(self) -> QueuedRequest:
        """The oldest one; a lane is dropped when it is empty."""
        while self.items[0].is_removed:
            self.items.popleft()
        return self.items[0]

    def enqueue(self, item: QueuedRequest) -> None:
        if self.items and item.seq < self.items[-1].seq:  # redelivered after younger ones
            self.items.insert(bisect(self.items, item.seq, key=_sequence), item)
        else:
            self.items.append(item)
        self.queued += 1
        self.tokens += item.cost

    def remove(self, item: QueuedRequest) -> None:
        item.is_removed = True
        self.queued -= 1
        self.tokens -= item.cost
        if len(self.items) > 2 * self.queued + STALE_ENTRIES_TOLERATED:
            self.items = deque(item for item in self.items if not item.is_removed)


def _sequence(item: QueuedRequest) -> int:
    return item.seq


class VersionQueue:
    """The lanes of one priority and pinned version; the tenant with the lowest counter is next.

    The calm and the heavy have an order each, since the heavy may have to wait when the calm need
    not. `accounts` are the owner's; it tells by `moved` when one has changed. An order is a heap
    whose entries are stale when they differ from the account: skipped at its top, bounded in
    number.
    """

    __slots__ = ("_heaps", "_tenants", "by_tenant")

    def __init__(self, accounts: Mapping[str, TenantState]) -> None:
        self.by_tenant: dict[str, TenantQueue] = {}
        self._tenants = accounts
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])  # by `is_heavy`

    def enqueue(self, item: QueuedRequest) -> None:
        lane = self.by_tenant.get(item.tenant)
        if lane is None:
            lane = self.by_tenant[item.tenant] = TenantQueue()
            self.reorder(item.tenant)
        lane.enqueue(item)

    def reorder(self, tenant: str) -> None:
        """A tenant's counter or side has changed."""
        if tenant in self.by_tenant:
            account = self._tenants[tenant]
            heapq.heappush(self._heaps[account.is_above_share], (account.counter, tenant))
            self._trim(account.is_above_share)

    def heads(self) -> list[QueuedRequest]:
        """Of the calm and of the heavy the item that is next; both stay."""
        return [head for side in (False, True) if (head := self._head(side))]

    def _head(self, is_heavy: bool) -> QueuedRequest | None:
        order = self._heaps[is_heavy]
        while order:
            entry = order[0]
            if entry[1] in self.by_tenant and entry == self._entry(entry[1], is_heavy):
                return self.by_tenant[entry[1]].head
            heapq.heappop(order)
        return None

    def remove(self, item: QueuedRequest) -> None:
        """Forget an item, wherever it waits."""
        lane = self.by_tenant[item.tenant]
        lane.remove(item)
        if not lane.queued:
            del self.by_tenant[item.tenant]

    def _entry(self, tenant: str, is_heavy: bool) -> _Entry | None:
        """Its place in an order, where it has one."""
        account = self._tenants[tenant]
        return (account.counter, tenant) if account.is_above_share == is_heavy else None

    def _trim(self, is_heavy: bool) -> None:
        if len(self._heaps[is_heavy]) > 2 * len(self.by_tenant) + STALE_ENTRIES_TOLERATED:
            entries = (self._entry(tenant, is_heavy) for tenant in self.by_tenant)
            self._heaps[is_heavy][:] = sorted(entry for entry in entries if entry)

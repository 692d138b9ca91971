"""Lines of waiting requests: lanes by tenant, and which tenant of a line is next. Pure."""

import heapq
from bisect import bisect
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from streams.subjects import Priority

SLACK = 64  # stale entries that are not worth a search


@dataclass(slots=True, eq=False)
class Queued:
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
    gone: bool = False
    adapter: str = ""
    account: str = ""


@dataclass(slots=True)
class Lane:
    """One tenant's requests of one line, oldest first; those that are gone are skipped."""

    items: deque[Queued] = field(default_factory=deque)
    queued: int = 0
    tokens: int = 0

    @property
    def head(self) -> Queued:
        """The oldest one; a lane is dropped when it is empty."""
        while self.items[0].gone:
            self.items.popleft()
        return self.items[0]

    def push(self, item: Queued) -> None:
        if self.items and item.seq < self.items[-1].seq:  # redelivered after younger ones
            self.items.insert(bisect(self.items, item.seq, key=_sequence), item)
        else:
            self.items.append(item)
        self.queued += 1
        self.tokens += item.cost

    def drop(self, item: Queued) -> None:
        item.gone = True
        self.queued -= 1
        self.tokens -= item.cost
        if len(self.items) > 2 * self.queued + SLACK:
            self.items = deque(item for item in self.items if not item.gone)


def _sequence(item: Queued) -> int:
    return item.seq


class Line:
    """The lanes of one priority and pinned version; the tenant with the lowest counter is next.

    `counters` are the owner's; it tells by `moved` when one has changed. The order is a heap whose
    entries are stale when they differ from the counters: skipped at its top, bounded in number.
    """

    __slots__ = ("_counters", "_order", "lanes")

    def __init__(self, counters: Mapping[str, float]) -> None:
        self.lanes: dict[str, Lane] = {}
        self._counters = counters
        self._order: list[tuple[float, str]] = []

    def push(self, item: Queued) -> None:
        lane = self.lanes.get(item.tenant)
        if lane is None:
            lane = self.lanes[item.tenant] = Lane()
            self.moved(item.tenant)
        lane.push(item)

    def moved(self, tenant: str) -> None:
        """A tenant's counter has changed."""
        if tenant in self.lanes:
            heapq.heappush(self._order, (self._counters[tenant], tenant))
            self._trim()

    def head(self) -> Queued | None:
        """The item that is next, which stays."""
        order = self._order
        while order:
            counter, tenant = order[0]
            if tenant in self.lanes and counter == self._counters[tenant]:
                return self.lanes[tenant].head
            heapq.heappop(order)
        return None

    def drop(self, item: Queued) -> None:
        """Forget an item, wherever it waits."""
        lane = self.lanes[item.tenant]
        lane.drop(item)
        if not lane.queued:
            del self.lanes[item.tenant]

    def _trim(self) -> None:
        if len(self._order) > 2 * len(self.lanes) + SLACK:
            self._order = [(self._counters[tenant], tenant) for tenant in self.lanes]
            heapq.heapify(self._order)

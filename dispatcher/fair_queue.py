"""The fair queue: requests per tenant and priority, popped so that tenants spend alike. Pure.

Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each
tenant's counter grows by the service it got, prompt tokens + 2 * generated tokens over its weight,
and the tenant with the lowest counter is next. A request is charged its reserved cost when it is
popped and corrected when it is settled. A tenant that returns gets no credit for its absence.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from dispatcher.lines import SLACK, Lane, Line, Queued
from streams.subjects import Priority

OUTPUT_WEIGHT = 2  # a generated token costs about twice a prompt token (the paper's w_q)
DEFAULT_TRICKLE_SECONDS = 5.0
MILLISECOND = 0.001


def service(prompt_tokens: int, generated_tokens: int) -> int:
    """The service of a request in virtual tokens."""
    return prompt_tokens + OUTPUT_WEIGHT * generated_tokens


def expected_service(item: Queued) -> int:
    """What a request is charged until its usage is known."""
    return service(item.prompt_tokens, item.cost - item.prompt_tokens)


@dataclass(slots=True)
class _Backlog:
    """One priority over all tenants; `served` is when it last was, or began to wait."""

    queued: int = 0
    tokens: int = 0
    served: float = 0.0


class FairQueue:
    """Queue requests per tenant; pop them so that tenants spend alike.

    Priorities are strict, but a lower one that has waited `trickle_seconds` without being served
    gets one request through. Requests that pin a version wait in lines of their own, so that a
    version without room holds up nobody else; the counters are shared. Times are epoch seconds,
    given by the caller. `push`, `pop` and `remove` cost O(log tenants).
    """

    def __init__(self, trickle_seconds: float = DEFAULT_TRICKLE_SECONDS) -> None:
        self._trickle = trickle_seconds
        self._counters: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._waiting: dict[str, int] = {}  # requests by tenant
        self._backlogs = {priority: _Backlog() for priority in Priority}
        self._lines: dict[Priority, dict[str, Line]] = {priority: {} for priority in Priority}
        self._items: dict[str, Queued] = {}
        self._deadlines: list[tuple[int, str]] = []  # a heap, with entries of what is gone
        self._last_left = ""  # the tenant that was served last

    def __len__(self) -> int:
        return len(self._items)

    def get(self, request_id: str) -> Queued | None:
        return self._items.get(request_id)

    def set_weight(self, tenant: str, weight: float) -> None:
        self._weights[tenant] = weight

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def push(self, item: Queued, now: float) -> None:
        """Queue an item; one that is queued already is ignored."""
        if item.request_id in self._items:
            return
        if item.tenant not in self._waiting:
            self._counters[item.tenant] = max(self.counter(item.tenant), self._lowest_counter())
        backlog = self._backlogs[item.priority]
        if not backlog.queued:
            backlog.served = now
        self._line(item).push(item)
        self._items[item.request_id] = item
        heapq.heappush(self._deadlines, (item.deadline, item.request_id))
        self._count(item, +1)

    def candidates(self, now: float) -> Iterator[Queued]:
        """The first item of each line: by priority, then by the counter of its tenant.

        Whoever takes one, or lets one wait, decides; the queue may change meanwhile.
        """
        for priority in self._by_urgency(now):
            heads = [head for line in self._lines[priority].values() if (head := line.head())]
            if len(heads) > 1:
                heads.sort(key=lambda item: (self._counters[item.tenant], item.seq))
            yield from heads

    def peek(self, now: float) -> Queued | None:
        """The item that is next, which stays queued."""
        return next(self.candidates(now), None)

    def pop(self, item: Queued, now: float) -> None:
        """Take out an item that was a candidate, and charge its tenant."""
        self._drop(item)
        self._backlogs[item.priority].served = now
        self._last_left = item.tenant
        self.charge(item.tenant, expected_service(item))

    def remove(self, request_id: str) -> Queued | None:
        """Take out an item that is not to be run; nothing is charged."""
        item = self._items.get(request_id)
        if item:
            self._drop(item)
        return item

    def expired(self, now: float) -> list[Queued]:
        """Take out every item whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] * MILLISECOND <= now:
            _, request_id = heapq.heappop(self._deadlines)
            if item := self.remove(request_id):
                late.append(item)
        return late

    def charge(self, tenant: str, virtual_tokens: float) -> None:
        """Add service to a tenant's counter, or correct it (a negative amount)."""
        self._counters[tenant] = self.counter(tenant) + virtual_tokens / self.weight(tenant)
        if tenant in self._waiting:
            for lines in self._lines.values():
                for line in lines.values():
                    line.moved(tenant)

    def queued(self, priority: Priority) -> tuple[int, int]:
        """Requests and reserved tokens of one priority."""
        return self._backlogs[priority].queued, self._backlogs[priority].tokens

    def lanes(self) -> Iterator[tuple[str, Priority, Lane]]:
        """Every lane that is not empty, with its tenant; pinned versions have their own."""
        for priority, lines in self._lines.items():
            for line in lines.values():
                for tenant, lane in line.lanes.items():
                    yield tenant, priority, lane

    @property
    def oldest(self) -> Queued | None:
        """The item that has been in REQUESTS for longest; it looks at every lane."""
        heads = (lane.head for _, _, lane in self.lanes())
        return min(heads, key=lambda item: item.seq, default=None)

    def counter(self, tenant: str) -> float:
        """The service that a tenant got, over its weight."""
        return self._counters.get(tenant, 0.0)

    def _line(self, item: Queued) -> Line:
        lines = self._lines[item.priority]
        if (line := lines.get(item.version)) is None:
            line = lines[item.version] = Line(self._counters)
        return line

    def _lowest_counter(self) -> float:
        """The lowest counter of the tenants that wait now, else that of the one served last."""
        heads = (line.head() for lines in self._lines.values() for line in lines.values())
        waiting = [self._counters[head.tenant] for head in heads if head]
        return min(waiting) if waiting else self.counter(self._last_left)

    def _by_urgency(self, now: float) -> list[Priority]:
        starving = [priority for priority in Priority if self._starves(priority, now)]
        if not starving:
            return list(Priority)
        return starving[::-1] + [p for p in Priority if p not in starving]

    def _starves(self, priority: Priority, now: float) -> bool:
        backlog = self._backlogs[priority]
        waits = backlog.queued > 0 and now - backlog.served >= self._trickle
        return waits and priority is not Priority.INTERACTIVE

    def _drop(self, item: Queued) -> None:
        del self._items[item.request_id]
        lines = self._lines[item.priority]
        lines[item.version].drop(item)
        if not lines[item.version].lanes:
            del lines[item.version]
        self._count(item, -1)
        if len(self._deadlines) > 2 * len(self._items) + SLACK:
            self._deadlines = [(item.deadline, name) for name, item in self._items.items()]
            heapq.heapify(self._deadlines)

    def _count(self, item: Queued, sign: int) -> None:
        backlog = self._backlogs[item.priority]
        backlog.queued += sign
        backlog.tokens += sign * item.cost
        waiting = self._waiting.get(item.tenant, 0) + sign
        if waiting:
            self._waiting[item.tenant] = waiting
        else:
            del self._waiting[item.tenant]

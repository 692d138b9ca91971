"""What others do, as one queue in front of all engines, which knows their room at once.

FCFS, as vLLM and SGLang do within one engine. VTC: Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024, algorithm 2, with w_p = 1 and w_q = 2. EDF: the earliest deadline
first. Early rejection: FCFS that refuses at the door what by its estimate would miss its goal, as
Mooncake does (Qin et al., FAST 2025).
"""

import heapq
import itertools
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from dispatcher.estimate.service_rate import ServiceRate
from dispatcher.queueing.fair_queue import OUTPUT_WEIGHT
from simulation.request import SimulatedRequest

# Of a goal that an estimated wait may take: of 0.5, 0.65, 0.8 and 1 the best at overload
MARGIN = 0.65


class Policy(Protocol):
    """Who is next. The owner removes from the head alone; times are seconds."""

    def admits(self, fate: SimulatedRequest) -> bool:
        """Whether to take it in at all."""

    def push(self, fate: SimulatedRequest) -> None: ...

    def head(self) -> SimulatedRequest | None:
        """Who is next, and stays."""

    def pop(self) -> SimulatedRequest:
        """Take out the head: it begins."""

    def progress(self, fate: SimulatedRequest, generated: int) -> None:
        """So many tokens have been generated for a request that has begun."""

    def tick(self, now: float) -> None:
        """Called every 200 ms."""


class Fcfs:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[SimulatedRequest] = deque()

    def admits(self, fate: SimulatedRequest) -> bool:
        return True

    def push(self, fate: SimulatedRequest) -> None:
        self._waiting.append(fate)

    def head(self) -> SimulatedRequest | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> SimulatedRequest:
        return self._waiting.popleft()

    def progress(self, fate: SimulatedRequest, generated: int) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class Edf(Fcfs):
    """Earliest deadline first; a goal is a deadline, too."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SimulatedRequest]] = []
        self._order = itertools.count()

    def push(self, fate: SimulatedRequest) -> None:
        goal = fate.spec.goal_seconds
        due = fate.deadline if goal is None else min(fate.deadline, fate.spec.at + goal)
        heapq.heappush(self._heap, (due, next(self._order), fate))

    def head(self) -> SimulatedRequest | None:
        return self._heap[0][2] if self._heap else None

    def pop(self) -> SimulatedRequest:
        return heapq.heappop(self._heap)[2]


class EarlyReject(Fcfs):
    """FCFS, but not for what would have to wait for longer than its goal, or its deadline."""

    def __init__(self) -> None:
        super().__init__()
        self._pace = ServiceRate()
        self._tokens = 0  # reserved by those that wait

    def admits(self, fate: SimulatedRequest) -> bool:
        wait = self._pace.estimate_wait(self._tokens)
        asked = fate.spec
        goal = asked.goal_seconds or asked.deadline_seconds
        return wait is None or wait <= MARGIN * min(goal, asked.deadline_seconds)

    def push(self, fate: SimulatedRequest) -> None:
        super().push(fate)
        self._tokens += fate.spec.cost

    def pop(self) -> SimulatedRequest:
        fate = super().pop()
        self._tokens -= fate.spec.cost
        return fate

    def progress(self, fate: SimulatedRequest, generated: int) -> None:
        if fate.is_over:
            self._pace.record_freed(fate.spec.cost)

    def tick(self, now: float) -> None:
        self._pace.tick(now, backlogged=bool(self._waiting))


class Vtc(Fcfs):
    """The tenant with the lowest counter is next; a prompt is charged at its start, then tokens."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._counters: dict[str, float] = {}
        self._lanes: dict[str, deque[SimulatedRequest]] = {}
        self._charged: dict[str, int] = {}  # generated tokens, by request
        self._last_left = ""

    def push(self, fate: SimulatedRequest) -> None:
        tenant = fate.spec.tenant
        if tenant not in self._lanes:
            self._lift(tenant)
            self._lanes[tenant] = deque()
        self._lanes[tenant].append(fate)

    def _lift(self, tenant: str) -> None:
        """No credit for an absence: up to the lowest counter of those that wait."""
        waiting = [self._counters[other] for other in self._lanes]
        least = min(waiting) if waiting else self._counters.get(self._last_left, 0.0)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)

    def head(self) -> SimulatedRequest | None:
        if not self._lanes:
            return None
        return self._lanes[min(self._lanes, key=self._counters.__getitem__)][0]

    def pop(self) -> SimulatedRequest:
        fate = self.head()
        assert fate is not None
        tenant = fate.spec.tenant
        self._lanes[tenant].popleft()
        if not self._lanes[tenant]:
            del self._lanes[tenant]
            self._last_left = tenant
        self._charge(tenant, fate.spec.prompt_tokens)
        self._charged[fate.request_id] = 0
        return fate

    def progress(self, fate: SimulatedRequest, generated: int) -> None:
        more = generated - self._charged[fate.request_id]
        self._charged[fate.request_id] = generated
        self._charge(fate.spec.tenant, OUTPUT_WEIGHT * more)

    def _charge(self, tenant: str, tokens: float) -> None:
        self._counters[tenant] += tokens / self._weights.get(tenant, 1.0)


class Replicas(Fcfs):
    """A VTC of its own in each of so many replicas, which are served by turns."""

    def __init__(self, replicas: int, weights: Mapping[str, float]) -> None:
        self._queues = deque(Vtc(weights) for _ in range(replicas))
        self._by_gateway = list(self._queues)

    def push(self, fate: SimulatedRequest) -> None:
        self._by_gateway[fate.spec.gateway].push(fate)

    def head(self) -> SimulatedRequest | None:
        heads = (queue.head() for queue in self._queues)
        return next((head for head in heads if head), None)

    def pop(self) -> SimulatedRequest:
        while not self._queues[0].head():
            self._queues.rotate(-1)
        fate = self._queues[0].pop()
        self._queues.rotate(-1)
        return fate

    def progress(self, fate: SimulatedRequest, generated: int) -> None:
        self._by_gateway[fate.spec.gateway].progress(fate, generated)

"""Baseline schedulers: one queue in front of all engines, which knows their free capacity at once.

FCFS, as vLLM and SGLang do within one engine. VTC: Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024, algorithm 2, with w_p = 1 and w_q = 2. EDF: the earliest deadline
first. Early rejection: FCFS that refuses on arrival what by its estimate would miss its goal, as
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

# Of a goal, the part that an estimated wait may take: the best of 0.5, 0.65, 0.8, 1 at overload
GOAL_FRACTION = 0.65


class Policy(Protocol):
    """A queue that decides which request is next. Times are seconds.

    The owner removes requests from the head only.
    """

    def admits(self, request: SimulatedRequest) -> bool:
        """True if a request is taken in at all."""

    def push(self, request: SimulatedRequest) -> None:
        """Queue a request."""

    def head(self) -> SimulatedRequest | None:
        """The request that is next, which stays queued; None if nothing is queued."""

    def pop(self) -> SimulatedRequest:
        """Remove and return the head: it begins to run."""

    def progress(self, request: SimulatedRequest, generated: int) -> None:
        """Note that `generated` tokens in all have been generated for a running request."""

    def tick(self, now: float) -> None:
        """Note the time; called every 200 ms."""


class Fcfs:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[SimulatedRequest] = deque()

    def admits(self, request: SimulatedRequest) -> bool:
        return True

    def push(self, request: SimulatedRequest) -> None:
        self._waiting.append(request)

    def head(self) -> SimulatedRequest | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> SimulatedRequest:
        return self._waiting.popleft()

    def progress(self, request: SimulatedRequest, generated: int) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class Edf(Fcfs):
    """Earliest deadline first; a goal counts as a deadline, too."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SimulatedRequest]] = []
        self._order = itertools.count()

    def push(self, request: SimulatedRequest) -> None:
        goal = request.spec.goal_seconds
        due = request.deadline if goal is None else min(request.deadline, request.spec.at + goal)
        heapq.heappush(self._heap, (due, next(self._order), request))

    def head(self) -> SimulatedRequest | None:
        return self._heap[0][2] if self._heap else None

    def pop(self) -> SimulatedRequest:
        return heapq.heappop(self._heap)[2]


class EarlyReject(Fcfs):
    """FCFS that refuses a request which would wait for longer than its goal, or its deadline."""

    def __init__(self) -> None:
        super().__init__()
        self._service_rate = ServiceRate()
        self._tokens = 0  # reserved by the queued requests

    def admits(self, request: SimulatedRequest) -> bool:
        wait = self._service_rate.estimate_wait(self._tokens)
        spec = request.spec
        goal = spec.goal_seconds or spec.deadline_seconds
        return wait is None or wait <= GOAL_FRACTION * min(goal, spec.deadline_seconds)

    def push(self, request: SimulatedRequest) -> None:
        super().push(request)
        self._tokens += request.spec.cost

    def pop(self) -> SimulatedRequest:
        request = super().pop()
        self._tokens -= request.spec.cost
        return request

    def progress(self, request: SimulatedRequest, generated: int) -> None:
        if request.is_over:
            self._service_rate.record_freed(request.spec.cost)

    def tick(self, now: float) -> None:
        self._service_rate.tick(now, backlogged=bool(self._waiting))


class Vtc(Fcfs):
    """Virtual token counter: the tenant with the lowest counter is next.

    A prompt is charged when it begins, output tokens as they are generated.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._counters: dict[str, float] = {}
        self._lanes: dict[str, deque[SimulatedRequest]] = {}
        self._charged: dict[str, int] = {}  # generated tokens, by request
        self._last_served = ""

    def push(self, request: SimulatedRequest) -> None:
        tenant = request.spec.tenant
        if tenant not in self._lanes:
            self._lift_counter(tenant)
            self._lanes[tenant] = deque()
        self._lanes[tenant].append(request)

    def _lift_counter(self, tenant: str) -> None:
        """Lift a returning tenant to the lowest waiting counter: absence earns no credit."""
        waiting = [self._counters[other] for other in self._lanes]
        least = min(waiting) if waiting else self._counters.get(self._last_served, 0.0)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)

    def head(self) -> SimulatedRequest | None:
        if not self._lanes:
            return None
        return self._lanes[min(self._lanes, key=self._counters.__getitem__)][0]

    def pop(self) -> SimulatedRequest:
        request = self.head()
        assert request is not None
        tenant = request.spec.tenant
        self._lanes[tenant].popleft()
        if not self._lanes[tenant]:
            del self._lanes[tenant]
            self._last_served = tenant
        self._charge(tenant, request.spec.prompt_tokens)
        self._charged[request.request_id] = 0
        return request

    def progress(self, request: SimulatedRequest, generated: int) -> None:
        more = generated - self._charged[request.request_id]
        self._charged[request.request_id] = generated
        self._charge(request.spec.tenant, OUTPUT_WEIGHT * more)

    def _charge(self, tenant: str, tokens: float) -> None:
        self._counters[tenant] += tokens / self._weights.get(tenant, 1.0)


class Replicas(Fcfs):
    """A separate VTC for each of several gateways, which are served in turns."""

    def __init__(self, replicas: int, weights: Mapping[str, float]) -> None:
        self._queues = deque(Vtc(weights) for _ in range(replicas))
        self._by_gateway = list(self._queues)

    def push(self, request: SimulatedRequest) -> None:
        self._by_gateway[request.spec.gateway].push(request)

    def head(self) -> SimulatedRequest | None:
        heads = (queue.head() for queue in self._queues)
        return next((head for head in heads if head), None)

    def pop(self) -> SimulatedRequest:
        while not self._queues[0].head():
            self._queues.rotate(-1)
        request = self._queues[0].pop()
        self._queues.rotate(-1)
        return request

    def progress(self, request: SimulatedRequest, generated: int) -> None:
        self._by_gateway[request.spec.gateway].progress(request, generated)

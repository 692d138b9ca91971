"""A simulated WORK stream of one pool: a queue per priority and per worker, and their pulls."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.simulation.delays import Delays
from bench.simulation.virtual_clock import VirtualClock
from simulation.request import SimulatedRequest
from streams.subjects import ANY

Take = Callable[[SimulatedRequest, int], None]


@dataclass(slots=True)
class WorkPull:
    """An outstanding pull of a worker: `wanted` more messages.

    `take` is called with each delivered request and its sequence.
    """

    take: Take
    wanted: int


@dataclass
class _Consumer:
    messages: deque[tuple[SimulatedRequest, int]] = field(default_factory=deque)
    pulls: deque[WorkPull] = field(default_factory=deque)


class WorkStream:
    """Delivers messages to the pulls in turn, one at a time.

    That is how nats-server serves a shared consumer.
    """

    def __init__(self, clock: VirtualClock, delays: Delays) -> None:
        self._clock, self._delays = clock, delays
        self._consumers: dict[str, _Consumer] = defaultdict(_Consumer)  # by priority, or by worker
        self._seq = 0

    def store(self, request: SimulatedRequest, placement: str = ANY) -> int:
        """Store a request for any worker, or for one; returns its sequence in the stream."""
        self._seq += 1
        consumer = self._consumers[request.priority if placement == ANY else placement]
        consumer.messages.append((request, self._seq))
        self._serve(consumer)
        return self._seq

    def pop_placed(self, worker: str) -> tuple[SimulatedRequest, int] | None:
        """Remove the oldest request that was placed on a worker and not pulled, with its sequence.

        None if there is none.
        """
        messages = self._consumers[worker].messages
        return messages.popleft() if messages else None

    def pull(self, name: str, pull: WorkPull) -> None:
        """Ask for messages of a priority, or for those that were placed on a worker."""
        consumer = self._consumers[name]
        consumer.pulls.append(pull)
        self._serve(consumer)

    def _serve(self, consumer: _Consumer) -> None:
        while consumer.messages and consumer.pulls:
            pull = consumer.pulls.popleft()
            pull.wanted -= 1
            if pull.wanted:
                consumer.pulls.append(pull)
            self._deliver(pull, *consumer.messages.popleft())

    def _deliver(self, pull: WorkPull, request: SimulatedRequest, seq: int) -> None:
        self._clock.call_later(self._delays.hop, lambda: pull.take(request, seq))

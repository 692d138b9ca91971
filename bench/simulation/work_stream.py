"""The WORK stream of one pool: a queue per priority and one per worker, and the pulls of each."""

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
    """What a worker still asks for; `take` gets each delivery with its sequence."""

    take: Take
    wanted: int


@dataclass
class _Consumer:
    messages: deque[tuple[SimulatedRequest, int]] = field(default_factory=deque)
    pulls: deque[WorkPull] = field(default_factory=deque)


class WorkStream:
    """Messages go to the pulls in turn, one at a time, as nats-server serves a shared consumer."""

    def __init__(self, clock: VirtualClock, delays: Delays) -> None:
        self._clock, self._delays = clock, delays
        self._consumers: dict[str, _Consumer] = defaultdict(_Consumer)  # by priority, or by worker
        self._seq = 0

    def store(self, fate: SimulatedRequest, placement: str = ANY) -> int:
        """Store a request; its sequence in the stream."""
        self._seq += 1
        lane = self._consumers[fate.priority if placement == ANY else placement]
        lane.messages.append((fate, self._seq))
        self._serve(lane)
        return self._seq

    def pop_placed(self, worker: str) -> tuple[SimulatedRequest, int] | None:
        """The oldest request that was placed on a worker and not pulled, and its sequence."""
        messages = self._consumers[worker].messages
        return messages.popleft() if messages else None

    def pull(self, name: str, pull: WorkPull) -> None:
        """Ask for messages of a priority, or for those that were placed on a worker."""
        lane = self._consumers[name]
        lane.pulls.append(pull)
        self._serve(lane)

    def _serve(self, lane: _Consumer) -> None:
        while lane.messages and lane.pulls:
            pull = lane.pulls.popleft()
            pull.wanted -= 1
            if pull.wanted:
                lane.pulls.append(pull)
            self._deliver(pull, *lane.messages.popleft())

    def _deliver(self, pull: WorkPull, fate: SimulatedRequest, seq: int) -> None:
        self._clock.call_later(self._delays.hop, lambda: pull.take(fate, seq))

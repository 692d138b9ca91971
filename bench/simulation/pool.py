"""The WORK stream of one pool: a queue per priority and one per worker, and the pulls of each."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.simulation.clock import Clock
from bench.simulation.delays import Delays
from bench.simulation.request import Fate
from streams.subjects import ANY

Take = Callable[[Fate, int], None]


@dataclass(slots=True)
class Pull:
    """What a worker still asks for; `take` gets each delivery with its sequence."""

    take: Take
    wanted: int


@dataclass
class _Lane:
    messages: deque[tuple[Fate, int]] = field(default_factory=deque)
    pulls: deque[Pull] = field(default_factory=deque)


class Pool:
    """Messages go to the pulls in turn, one at a time, as nats-server serves a shared consumer."""

    def __init__(self, clock: Clock, delays: Delays) -> None:
        self._clock, self._delays = clock, delays
        self._lanes: dict[str, _Lane] = defaultdict(_Lane)  # by priority, or by worker
        self._seq = 0

    def put(self, fate: Fate, placement: str = ANY) -> int:
        """Store a request; its sequence in the stream."""
        self._seq += 1
        lane = self._lanes[fate.priority if placement == ANY else placement]
        lane.messages.append((fate, self._seq))
        self._serve(lane)
        return self._seq

    def take_back(self, worker: str) -> tuple[Fate, int] | None:
        """The oldest request that was placed on a worker and not pulled, and its sequence."""
        messages = self._lanes[worker].messages
        return messages.popleft() if messages else None

    def pull(self, name: str, pull: Pull) -> None:
        """Ask for messages of a priority, or for those that were placed on a worker."""
        lane = self._lanes[name]
        lane.pulls.append(pull)
        self._serve(lane)

    def _serve(self, lane: _Lane) -> None:
        while lane.messages and lane.pulls:
            pull = lane.pulls.popleft()
            pull.wanted -= 1
            if pull.wanted:
                lane.pulls.append(pull)
            self._deliver(pull, *lane.messages.popleft())

    def _deliver(self, pull: Pull, fate: Fate, seq: int) -> None:
        self._clock.after(self._delays.hop, lambda: pull.take(fate, seq))

"""The WORK stream of one pool: a queue per priority, and the pulls that wait for it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.simulation.clock import Clock
from bench.simulation.delays import Delays
from bench.simulation.request import Fate
from streams.subjects import Priority

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
        self._lanes = {priority: _Lane() for priority in Priority}
        self._seq = 0

    def put(self, fate: Fate) -> int:
        """Store a request; its sequence in the stream."""
        self._seq += 1
        lane = self._lanes[fate.priority]
        lane.messages.append((fate, self._seq))
        self._serve(lane)
        return self._seq

    def pull(self, priority: Priority, pull: Pull) -> None:
        lane = self._lanes[priority]
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

"""What a model's requests have to expect: their wait, their computing, and who is late. Pure."""

from dispatcher.backlog import Basin, Weight, ahead, ahead_of_newcomer, basins
from dispatcher.compute import Learned, Ran
from dispatcher.fair_queue import FairQueue
from dispatcher.fleet import Fleet
from dispatcher.lines import Queued
from dispatcher.pace import Pace
from streams.messages import LedgerRecord, Pressure
from streams.subjects import Priority

LATE_AFTER_SECONDS = 1.0  # a request that has waited for less is tried, whatever is expected of it
ANSWERED = "stop", "length"  # outcomes that tell how long a request takes


class Outlook:
    """Learns from what has left the fleet; tells what to expect of what waits."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._learned = Learned()
        self._manned_at: float | None = None  # when there was a worker, or at the first tick
        self._unmanned_seconds = 0.0

    def tick(self, now: float, backlogged: bool, workers: int) -> None:
        """Let time pass; call it regularly."""
        self.pace.tick(now, backlogged, workers)
        if workers or self._manned_at is None:
            self._manned_at = now
        self._unmanned_seconds = now - self._manned_at

    def learn(self, dispatched: float, cost: int, record: LedgerRecord) -> None:
        """A request that was dispatched then (epoch seconds) has ended."""
        if record.first and record.attempts == 1 and record.outcome in ANSWERED:
            self._learned.add(_ran(dispatched, cost, record))

    def too_late(self, item: Queued, now: float) -> bool:
        """True for what has waited, and would not see its first output before its deadline."""
        compute = self._learned.compute
        if compute is None or now - item.accepted / 1000 < LATE_AFTER_SECONDS:
            return False
        return now + compute.first_seconds(item.prompt_tokens) > item.deadline / 1000

    def pressure(self, model: str, queue: FairQueue, fleet: Fleet) -> Pressure:
        """What the gateways are told: how much waits, and for how long a new request would."""
        waiting, turn, higher = basins(queue), _turn(queue, fleet), 0.0
        lowest = min((basin.counter for each in waiting.values() for basin in each), default=0.0)
        queued: dict[str, int] = {}
        wait: dict[str, float | None] = {}
        tenants: dict[str, dict[str, float]] = {}
        for priority, theirs in waiting.items():
            queued[priority], tokens = queue.queued(priority)
            first = max(turn, ahead_of_newcomer(theirs, lowest)) if turn else 0.0
            wait[priority] = self.pace.wait_seconds(higher + first)
            for tenant, seconds in self._waits(theirs, queue.weight, higher + turn):
                tenants.setdefault(tenant, {})[priority] = seconds
            higher += tokens
        return Pressure(
            model,
            len(fleet.workers()),
            queued,
            wait,
            tenants,
            self.pace.seconds_per_token,
            self._learned.compute,
            self._unmanned_seconds,
            self.pace.uncertainty,
        )

    def _waits(self, theirs: list[Basin], weight: Weight, before: float) -> list[tuple[str, float]]:
        """Of tenants with a backlog: the wait behind it and behind `before` tokens."""
        pace = self.pace
        if (seconds := pace.seconds_per_token) is None:
            return []
        found = ahead(theirs, weight, pace.charge_per_token)
        return [(name, (before + tokens) * seconds) for name, tokens in found]


def _turn(queue: FairQueue, fleet: Fleet) -> float:
    """Tokens to be released before the next in line has room: none, or one request's."""
    if not len(queue):
        return 0.0
    mean = sum(queue.queued(priority)[1] for priority in Priority) / len(queue)
    return 0.0 if _has_room(fleet, mean) else mean


def _has_room(fleet: Fleet, cost: float) -> bool:
    beats = [beat for beat in fleet.workers() if not beat.draining]
    sequences = sum(beat.free_sequences for beat in beats) - len(fleet.unpulled)
    return sequences > 0 and any(beat.free_tokens >= cost for beat in beats)


def _ran(dispatched: float, cost: int, record: LedgerRecord) -> Ran:
    first = record.first / 1000
    return Ran(
        prompt_tokens=record.prompt_tokens,
        most_output=cost - record.prompt_tokens,
        output=record.completion_tokens,
        first_seconds=max(0.0, first - dispatched),
        rest_seconds=max(0.0, record.finished / 1000 - first),
    )

"""What a model's requests have to expect: their wait, their computing, and who is late. Pure."""

from dispatcher.backlog import Basin, Weight, ahead, ahead_of_newcomer, basins
from dispatcher.compute import Learned, Ran
from dispatcher.fair_queue import FairQueue
from dispatcher.fleet import Fleet
from dispatcher.lines import Queued
from dispatcher.pace import Pace
from dispatcher.unpulled import Credit
from streams.messages import LedgerRecord, Pressure
from streams.subjects import Priority

LATE_AFTER_SECONDS = 1.0  # a request that has waited for less is tried, whatever is expected of it
ANSWERED = "stop", "length"  # outcomes that tell how long a request takes


class Outlook:
    """Learns from what has left the fleet; tells what to expect of what waits."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._learned = Learned()
        self._sent = 0  # reserved tokens, since the last tick
        self._free, self._whole = 0, Credit()  # the fleet's room at the last tick
        self._manned_at: float | None = None  # when there was a worker, or at the first tick
        self._unmanned_seconds = 0.0

    def sent(self, cost: int) -> None:
        """A request of this reserved cost is sent to the fleet, or (less than 0) was not."""
        self._sent += cost

    def tick(self, now: float, queue: FairQueue, fleet: Fleet) -> None:
        """Let time pass; call it regularly."""
        workers = len(fleet.workers())
        self._release(fleet)
        room = _requests_room(fleet.whole, _mean_cost(queue))
        lasting = self._learned.seconds(sum(beat.running for beat in fleet.workers()))
        self.pace.tick(now, len(queue) > 0, workers, room, lasting)
        if workers or self._manned_at is None:
            self._manned_at = now
        self._unmanned_seconds = now - self._manned_at

    def _release(self, fleet: Fleet) -> None:
        """Room came free for what was sent, less what there was before, and more of it is there.

        An end alone frees nothing: the fleet may still need all its room for what goes on.
        """
        free, whole = fleet.free_tokens, fleet.whole
        if whole == self._whole:
            self.pace.release(self._sent + free - self._free)
        self._sent, self._free, self._whole = 0, free, whole

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
        waiting, higher, mean = basins(queue), 0.0, _mean_cost(queue)
        lowest = min((basin.counter for each in waiting.values() for basin in each), default=0.0)
        queued: dict[str, int] = {}
        wait: dict[str, float | None] = {}
        tenants: dict[str, dict[str, float]] = {}
        room = {each: _requests_room(fleet.room(each), mean) for each in Priority}
        for priority, theirs in waiting.items():
            queued[priority], tokens = queue.queued(priority)
            turn = 0.0 if room[priority] >= mean else mean
            first = max(turn, ahead_of_newcomer(theirs, lowest)) if turn else 0.0
            wait[priority] = self.pace.wait_seconds(higher + first)
            for tenant, seconds in self._waits(theirs, queue.weight, higher + turn):
                tenants.setdefault(tenant, {})[priority] = seconds
            higher += tokens
        return Pressure(
            model,
            len({beat.worker for beat in fleet.workers()}),
            queued,
            wait,
            tenants,
            self.pace.seconds_per_token,
            self._learned.compute,
            self._unmanned_seconds,
            self.pace.uncertainty,
            {priority.value: tokens for priority, tokens in room.items()},
        )

    def _waits(self, theirs: list[Basin], weight: Weight, before: float) -> list[tuple[str, float]]:
        """Of tenants with a backlog: the wait behind it and behind `before` tokens."""
        pace = self.pace
        if (seconds := pace.seconds_per_token) is None:
            return []
        found = ahead(theirs, weight, pace.charge_per_token)
        return [(name, (before + tokens) * seconds) for name, tokens in found]


def _mean_cost(queue: FairQueue) -> float:
    """Reserved tokens of a request that waits; 0 where none does."""
    return sum(queue.queued(each)[1] for each in Priority) / max(1, len(queue))


def _requests_room(room: Credit, mean: float) -> float:
    """The tokens of requests like those that wait which would run in it at once."""
    return min(room.tokens, room.sequences * mean) if mean else room.tokens


def _ran(dispatched: float, cost: int, record: LedgerRecord) -> Ran:
    first = record.first / 1000
    return Ran(
        prompt_tokens=record.prompt_tokens,
        most_output=cost - record.prompt_tokens,
        output=record.completion_tokens,
        first_seconds=max(0.0, first - dispatched),
        rest_seconds=max(0.0, record.finished / 1000 - first),
    )

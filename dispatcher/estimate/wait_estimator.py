"""What a model's requests have to expect: their wait, their computing, and who is late. Pure."""

from dispatcher.estimate.service_rate import ServiceRate
from dispatcher.estimate.time_model import CompletedRun, TimeModel
from dispatcher.queueing.fair_queue import FairQueue
from dispatcher.queueing.queue_position import (
    LaneBacklog,
    WeightOf,
    collect_backlogs,
    count_tokens_ahead,
    count_tokens_ahead_of_newcomer,
)
from dispatcher.queueing.tenant_queues import QueuedRequest
from dispatcher.workers.fleet import Fleet
from dispatcher.workers.pending_work import FleetCapacity
from streams.messages import LedgerRecord, Pressure
from streams.subjects import Priority

LATE_AFTER_SECONDS = 1.0  # a request that has waited for less is tried, whatever is expected of it
COMPLETED_OUTCOMES = "stop", "length"  # outcomes that tell how long a request takes


class WaitEstimator:
    """Learns from what has left the fleet; tells what to expect of what waits."""

    def __init__(self) -> None:
        self.service_rate = ServiceRate()
        self._time_model = TimeModel()
        self._reserved_tokens = 0  # reserved tokens, since the last tick
        self._free_tokens, self._total_capacity = (
            0,
            FleetCapacity(),
        )  # the fleet's room at the last tick
        self._manned_at: float | None = None  # when there was a worker, or at the first tick
        self._unmanned_seconds = 0.0

    def count_reserved(self, cost: int) -> None:
        """A request of this reserved cost is sent to the fleet, or (less than 0) was not."""
        self._reserved_tokens += cost

    def tick(self, now: float, queue: FairQueue, fleet: Fleet) -> None:
        """Let time pass; call it regularly."""
        workers = len(fleet.last_heartbeats())
        self._record_freed(fleet)
        room = _usable_tokens(fleet.total_capacity, _mean_cost(queue))
        lasting = self._time_model.mean_seconds(
            sum(beat.running for beat in fleet.last_heartbeats())
        )
        self.service_rate.tick(now, len(queue) > 0, workers, room, lasting)
        if workers or self._manned_at is None:
            self._manned_at = now
        self._unmanned_seconds = now - self._manned_at

    def _record_freed(self, fleet: Fleet) -> None:
        """Room came free for what was sent, less what there was before, and more of it is there.

        An end alone frees nothing: the fleet may still need all its room for what goes on.
        """
        free, whole = fleet.free_tokens, fleet.total_capacity
        if whole == self._total_capacity:
            self.service_rate.record_freed(self._reserved_tokens + free - self._free_tokens)
        self._reserved_tokens, self._free_tokens, self._total_capacity = 0, free, whole

    def learn_duration(self, dispatched: float, cost: int, record: LedgerRecord) -> None:
        """A request that was dispatched then (epoch seconds) has ended."""
        if record.first and record.attempts == 1 and record.outcome in COMPLETED_OUTCOMES:
            self._time_model.add(_completed_run(dispatched, cost, record))

    def will_miss_deadline(self, item: QueuedRequest, now: float) -> bool:
        """True for what has waited, and would not see its first output before its deadline."""
        compute = self._time_model.compute
        if compute is None or now - item.accepted / 1000 < LATE_AFTER_SECONDS:
            return False
        return now + compute.first_seconds(item.prompt_tokens) > item.deadline / 1000

    def build_pressure(self, model: str, queue: FairQueue, fleet: Fleet) -> Pressure:
        """What the gateways are told: how much waits, and for how long a new request would."""
        waiting, higher, mean = collect_backlogs(queue), 0.0, _mean_cost(queue)
        lowest = min((basin.counter for each in waiting.values() for basin in each), default=0.0)
        queued: dict[str, int] = {}
        wait: dict[str, float | None] = {}
        tenants: dict[str, dict[str, float]] = {}
        room = {each: _usable_tokens(fleet.free_capacity(each), mean) for each in Priority}
        for priority, theirs in waiting.items():
            queued[priority], tokens = queue.count_queued(priority)
            turn = 0.0 if room[priority] >= mean else mean
            first = max(turn, count_tokens_ahead_of_newcomer(theirs, lowest)) if turn else 0.0
            wait[priority] = self.service_rate.estimate_wait(higher + first)
            for tenant, seconds in self._tenant_waits(theirs, queue.weight, higher + turn):
                tenants.setdefault(tenant, {})[priority] = seconds
            higher += tokens
        return Pressure(
            model,
            len({beat.worker for beat in fleet.last_heartbeats()}),
            queued,
            wait,
            tenants,
            self.service_rate.seconds_per_token,
            self._time_model.compute,
            self._unmanned_seconds,
            self.service_rate.uncertainty,
            {priority.value: tokens for priority, tokens in room.items()},
        )

    def _tenant_waits(
        self, theirs: list[LaneBacklog], weight: WeightOf, before: float
    ) -> list[tuple[str, float]]:
        """Of tenants with a backlog: the wait behind it and behind `before` tokens."""
        pace = self.service_rate
        if (seconds := pace.seconds_per_token) is None:
            return []
        found = count_tokens_ahead(theirs, weight, pace.charge_per_token)
        return [(name, (before + tokens) * seconds) for name, tokens in found]


def _mean_cost(queue: FairQueue) -> float:
    """Reserved tokens of a request that waits; 0 where none does."""
    return sum(queue.count_queued(each)[1] for each in Priority) / max(1, len(queue))


def _usable_tokens(room: FleetCapacity, mean: float) -> float:
    """The tokens of requests like those that wait which would run in it at once."""
    return min(room.tokens, room.sequences * mean) if mean else room.tokens


def _completed_run(dispatched: float, cost: int, record: LedgerRecord) -> CompletedRun:
    first = record.first / 1000
    return CompletedRun(
        prompt_tokens=record.prompt_tokens,
        most_output=cost - record.prompt_tokens,
        output=record.completion_tokens,
        first_seconds=max(0.0, first - dispatched),
        rest_seconds=max(0.0, record.finished / 1000 - first),
    )

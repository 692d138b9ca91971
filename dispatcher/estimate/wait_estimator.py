"""Estimates waits and run times, and who will miss its deadline, for one model. Pure."""

from collections.abc import Iterable
from functools import partial

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
from dispatcher.workers.unpulled_work import FleetCapacity
from streams.messages import LedgerRecord, Pressure
from streams.subjects import Priority

LATE_AFTER_SECONDS = 1.0  # a request that has waited for less is tried in any case
_NEWCOMER = ""  # stands for any tenant with nothing queued
COMPLETED_OUTCOMES = "stop", "length"  # other ends do not tell how long a request takes


class WaitEstimator:
    """Estimates, for one model, how long requests wait in the queue and how long they run.

    The model's leader owns it, reports events and calls `tick` regularly. Gateways receive the
    estimates (`build_pressure`) and refuse requests that would wait too long.
    """

    def __init__(self) -> None:
        self.service_rate = ServiceRate()
        self._time_model = TimeModel()
        self._reserved_tokens = 0  # of requests reserved since the last tick
        self._free_tokens, self._total_capacity = 0, FleetCapacity()  # at the last tick
        self._last_worker_at: float | None = None  # the first tick, if there was none
        self._no_worker_seconds = 0.0

    def count_reserved(self, cost: int) -> None:
        """Add to the tokens that were reserved on the fleet since the last `tick`, by one request.

        A negative `cost` takes back the reservation of a request that was not dispatched after all.
        """
        self._reserved_tokens += cost

    def tick(self, now: float, queue: FairQueue, fleet: Fleet) -> None:
        """Update the rate at which the fleet frees tokens, and how long it has had no workers.

        Call it regularly. `now` is seconds of any one monotonic clock.
        """
        workers = len(fleet.last_heartbeats())
        self._record_freed(fleet)
        usable_tokens = _usable_tokens(fleet.total_capacity, _mean_cost(queue))
        in_flight_tokens = queue.capacity_shares.in_flight_tokens
        self.service_rate.tick(now, len(queue) > 0, workers, usable_tokens, in_flight_tokens)
        if workers or self._last_worker_at is None:
            self._last_worker_at = now
        self._no_worker_seconds = now - self._last_worker_at

    def _record_freed(self, fleet: Fleet) -> None:
        """Record the tokens that came free: those reserved since, plus the growth of the free ones.

        An ended request alone frees nothing: the fleet may still need all its capacity for what
        goes on. Nothing is recorded when the fleet itself has changed.
        """
        free, total = fleet.free_tokens, fleet.total_capacity
        if total == self._total_capacity:
            self.service_rate.record_freed(self._reserved_tokens + free - self._free_tokens)
        self._reserved_tokens, self._free_tokens, self._total_capacity = 0, free, total

    def learn_duration(self, dispatched: float, cost: int, record: LedgerRecord) -> None:
        """Learn run times from the ledger record of an ended request.

        `dispatched` is when it was dispatched (epoch seconds), and `cost` its prompt tokens plus
        the most that it might generate. Ignored are requests without output, with more than one
        attempt, or with an outcome other than `stop` and `length`: their times do not tell how long
        a request takes.
        """
        if record.first and record.attempts == 1 and record.outcome in COMPLETED_OUTCOMES:
            self._time_model.add(_completed_run(dispatched, cost, record))

    def will_miss_deadline(self, item: QueuedRequest, now: float) -> bool:
        """Return whether a queued request would miss its deadline even if it were dispatched now.

        That is so if its first output is expected after the deadline. `now` is epoch seconds. False
        while run times are unknown, and for a request that has waited less than
        `LATE_AFTER_SECONDS` (1 s), which is tried in any case.
        """
        compute = self._time_model.compute
        if compute is None or now - item.accepted / 1000 < LATE_AFTER_SECONDS:
            return False
        return now + compute.first_seconds(item.prompt_tokens) > item.deadline / 1000

    def build_pressure(self, model: str, queue: FairQueue, fleet: Fleet) -> Pressure:
        """Return the report by which gateways learn the load of `model`.

        It has the queued requests and the estimated waits (seconds) of new requests by priority,
        the waits of the tenants with the largest backlogs, run times, and by priority the tokens of
        requests that would run at once. Waits that cannot be estimated yet are None, and no tenant
        has one then.
        """
        waiting, more_urgent, mean = collect_backlogs(queue), 0.0, _mean_cost(queue)
        lowest = min(
            (backlog.counter for each in waiting.values() for backlog in each), default=0.0
        )
        queued: dict[str, int] = {}
        wait: dict[str, float | None] = {}
        tenants: dict[str, dict[str, float]] = {}
        room: dict[str, float] = {}
        for priority, backlogs in waiting.items():
            free_tokens = _usable_tokens(fleet.free_capacity(priority), mean)
            room_for = partial(_room_tokens, queue, fleet, priority, mean, free_tokens)
            room[priority] = room_for(_NEWCOMER)
            queued[priority], tokens = queue.count_queued(priority)
            first = max(mean, count_tokens_ahead_of_newcomer(backlogs, lowest))
            wait[priority] = self.service_rate.estimate_wait(
                more_urgent + (0.0 if room[priority] >= mean else first)
            )
            for tenant, tokens_ahead in self._tokens_ahead(backlogs, queue.weight):
                turn = 0.0 if room_for(tenant) >= mean else mean
                seconds = self.service_rate.estimate_wait(more_urgent + tokens_ahead + turn)
                assert seconds is not None, "a rate is known"
                tenants.setdefault(tenant, {})[priority] = seconds
            more_urgent += tokens
        return Pressure(
            model,
            len({beat.worker for beat in fleet.last_heartbeats()}),
            queued,
            wait,
            tenants,
            self.service_rate.seconds_per_token,
            self._time_model.compute,
            self._no_worker_seconds,
            self.service_rate.uncertainty,
            room,
            {str(priority): queue.count_arrived(priority) for priority in Priority},
            queue.earliest_deadline,
            {str(priority): queue.count_queued(priority)[1] for priority in Priority},
        )

    def _tokens_ahead(
        self, backlogs: list[LaneBacklog], weight: WeightOf
    ) -> Iterable[tuple[str, float]]:
        """The tokens ahead of what each tenant queues next; nothing while no rate is known."""
        if self.service_rate.seconds_per_token is None:
            return ()
        return count_tokens_ahead(backlogs, weight, self.service_rate.charge_per_token)


def _mean_cost(queue: FairQueue) -> float:
    """The mean reserved tokens of a queued request; 0 where none is queued."""
    return sum(queue.count_queued(each)[1] for each in Priority) / max(1, len(queue))


def _usable_tokens(capacity: FleetCapacity, mean: float) -> float:
    """The tokens of the requests of mean cost that would run at once in a free capacity."""
    return min(capacity.tokens, capacity.sequences * mean) if mean else capacity.tokens


def _room_tokens(
    queue: FairQueue, fleet: Fleet, priority: Priority, mean: float, free_tokens: float, tenant: str
) -> float:
    """The part of `free_tokens` that a tenant's request of mean cost may take at once.

    The rest is kept free for other tenants.
    """
    headroom = queue.required_headroom(tenant, priority, round(mean), fleet.always_preempts_batch)
    return max(0.0, free_tokens - max(0.0, headroom) * fleet.total_capacity.tokens)


def _completed_run(dispatched: float, cost: int, record: LedgerRecord) -> CompletedRun:
    first = record.first / 1000
    return CompletedRun(
        prompt_tokens=record.prompt_tokens,
        most_output=cost - record.prompt_tokens,
        output=record.completion_tokens,
        first_seconds=max(0.0, first - dispatched),
        rest_seconds=max(0.0, record.finished / 1000 - first),
    )

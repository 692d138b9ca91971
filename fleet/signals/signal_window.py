"""All signals over the last seconds: fed with records, reports and beats, asked at a time. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from fleet.signals.arrival_rates import AcceptedRate, ArrivalRates
from fleet.signals.gateway_loads import GatewayLoads
from fleet.signals.ledger_window import LedgerWindow, ModelPriority, PriorityCounts
from fleet.signals.signal_report import GoalCounts, ModelSignals, PrioritySignals, SignalReport
from fleet.signals.worker_pools import WorkerPools
from streams.coordination.gateway_beats import GatewayBeat
from streams.messages import Heartbeat, LedgerRecord, Pressure, RefusalCounts
from streams.subjects import Priority

MIN_WINDOW_SECONDS = 10
# Within less than the broker takes to recognise a second record of a request, none is counted twice
MAX_WINDOW_SECONDS = 600
RECENT_SECONDS = 10  # over which arrivals are averaged for plans: a longer mean hides bursts
PRESSURE_SECONDS = 5.0  # an older report of a dispatcher says nothing any more
Goals = Mapping[str, Collection[str]]  # by model, the priorities that have a goal


class SignalWindow:
    """The signals of a cell over a window of `window_seconds`.

    `stored_at` and `now` are epoch seconds of one clock. Records and refusals come in the ledger's
    order.
    """

    def __init__(self, window_seconds: int) -> None:
        self.window_seconds = window_seconds
        self._ledger = LedgerWindow(window_seconds)
        self._arrivals: dict[str, ArrivalRates] = {}
        self._recent_arrivals: dict[str, ArrivalRates] = {}
        self._workers = defaultdict[str, WorkerPools](WorkerPools)
        self._gateways = GatewayLoads(window_seconds)

    def add_record(self, record: LedgerRecord, stored_at: float) -> None:
        """Take the ledger record of a request that has ended."""
        self._ledger.add_record(record, stored_at)

    def add_refusals(self, refusals: RefusalCounts, stored_at: float) -> None:
        """Take what a gateway has refused in a second."""
        self._ledger.add_refusals(refusals, stored_at)

    def add_pressure(self, pressure: Pressure, now: float) -> None:
        """Take a load report of a model's dispatcher."""
        for arrivals, seconds in (
            (self._arrivals, self.window_seconds),
            (self._recent_arrivals, RECENT_SECONDS),
        ):
            if known := arrivals.get(pressure.model):
                known.record(pressure, now)
            else:
                arrivals[pressure.model] = ArrivalRates(pressure, now, seconds)

    def add_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take a heartbeat of a worker."""
        self._workers[beat.model].record(beat, now)

    def add_gateway_beat(self, beat: GatewayBeat, now: float) -> None:
        """Take a beat of a gateway."""
        self._gateways.record(beat, now)

    def pressure(self, model: str) -> Pressure | None:
        """Return the last load report of a model's dispatcher; None if there is none of late."""
        return self._arrivals[model].pressure if model in self._arrivals else None

    def recent_rate(self, model: str, priority: str) -> AcceptedRate | None:
        """Return what arrived of a priority in the last `RECENT_SECONDS`; None if it is unknown."""
        arrivals = self._recent_arrivals.get(model)
        return arrivals.rate(priority) if arrivals else None

    def heartbeats(self) -> list[tuple[Heartbeat, float]]:
        """Return the last heartbeat of each worker and version, with the time it was heard."""
        return [each for pools in self._workers.values() for each in pools.heartbeats()]

    def report(self, now: float, goals: Goals) -> SignalReport:
        """Return what is known at `now`, and forget what is over.

        The models are those of `goals`, and others of which something is known. A refused request
        counts as one with a goal if `goals` has one for its model and priority.
        """
        self._expire(now)
        counted = defaultdict[str, list[str]](list)
        for model, priority in sorted(self._ledger.seen()):
            counted[model].append(priority)
        models = {*goals, *self._arrivals, *self._workers, *counted}
        return SignalReport(
            now,
            self.window_seconds,
            [
                self._measure_model(name, goals.get(name, ()), counted.get(name, ()))
                for name in sorted(models)
            ],
            self._gateways.measure(),
        )

    def _expire(self, now: float) -> None:
        self._ledger.expire(now)
        self._gateways.expire(now)
        for pools in self._workers.values():
            pools.expire(now)
        for model in [name for name, pools in self._workers.items() if not pools]:
            del self._workers[model]
        old = [m for m, each in self._arrivals.items() if now - each.heard_at > PRESSURE_SECONDS]
        for model in old:
            del self._arrivals[model], self._recent_arrivals[model]

    def _measure_model(
        self, model: str, goals: Collection[str], counted: Iterable[str]
    ) -> ModelSignals:
        """Measure all priorities, and what was refused before its priority was known."""
        priorities = dict.fromkeys([*map(str, Priority), *counted])
        return ModelSignals(
            model,
            [
                self._measure_priority(ModelPriority(model, each), each in goals)
                for each in priorities
            ],
            self._workers[model].measure() if model in self._workers else [],
        )

    def _measure_priority(self, key: ModelPriority, has_goal: bool) -> PrioritySignals:
        counts, arrivals = self._ledger.counts_of(key), self._arrivals.get(key.model)
        rate = arrivals.rate(key.priority) if arrivals else None
        pressure = arrivals.pressure if arrivals else None
        goal = _count_goals(counts, has_goal)
        return PrioritySignals(
            priority=key.priority,
            requests_per_second=rate.requests if rate else None,
            prompt_tokens_per_second=rate.prompt_tokens if rate else None,
            output_tokens_per_second=rate.output_tokens if rate else None,
            refused_tokens_per_second=self._refused_rate(
                counts, rate.mean_tokens if rate else None
            ),
            queued=pressure.queued.get(key.priority) if pressure else None,
            estimated_wait_seconds=pressure.wait_seconds.get(key.priority) if pressure else None,
            mean_queue_seconds=counts.mean_queue_seconds,
            ended=dict(counts.ended),
            refused=dict(counts.refused),
            prompt_tokens=counts.measured["prompt_tokens"],
            completion_tokens=counts.measured["completion_tokens"],
            goal=goal,
            attainment=goal.attainment,
        )

    def _refused_rate(self, counts: PriorityCounts, mean_tokens: float | None) -> float | None:
        """Tokens a second that were refused for want of capacity; None if no size is known."""
        refused = counts.refused_for_capacity
        if not refused:
            return 0.0
        mean = mean_tokens or _mean_ended_tokens(counts)
        return None if mean is None else refused * mean / self.window_seconds


def _mean_ended_tokens(counts: PriorityCounts) -> float | None:
    ended = counts.ended.total()
    tokens = counts.measured["prompt_tokens"] + counts.measured["completion_tokens"]
    return tokens / ended if ended else None


def _count_goals(counts: PriorityCounts, has_goal: bool) -> GoalCounts:
    measured, refused = counts.measured, counts.refused_for_capacity if has_goal else 0
    return GoalCounts(measured["attained"], measured["missed"], refused, measured["left"])

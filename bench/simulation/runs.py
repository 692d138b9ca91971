"""One run: a load against a system, until the last request has ended or the time is over."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

from bench.simulation.baselines import Fcfs
from bench.simulation.systems import Build, SimulatedCluster, System, with_policy
from bench.simulation.virtual_clock import VirtualClock
from bench.simulation.workloads import Workload
from dispatcher.queueing.fair_queue import service_tokens
from simulation.engine import SimulatedEngine
from simulation.request import RequestSpec, SimulatedRequest
from simulation.step_model import StepModel

SETTLING_SECONDS = 1.0  # for which a system has been there when its load begins
RETRY_SECONDS = 1.0  # after which a client asks again that was refused


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    fates: Sequence[SimulatedRequest]
    engines: Sequence[SimulatedEngine]
    served: float  # virtual tokens per second while the load went on
    ended: float  # when the run was over
    events: int


class SimulationRun:
    """Owns the clock, the load's position, and the fates."""

    def __init__(self, build: Build, plant: SimulatedCluster, load: Workload) -> None:
        self._clock, self._load = VirtualClock(-SETTLING_SECONDS), load
        self._fates: list[SimulatedRequest] = []
        self._open = 0
        self._next = 0
        self._served: float | None = None  # until the load is over
        self._system: System = build(plant, self._clock, self._ended)

    def run(self, drain_seconds: float) -> Outcome:
        """Until all that are awaited have ended, at most `drain_seconds` after the load."""
        self._clock.call_at(self._load.seconds, self._look)
        self._arrive()
        self._clock.run(self._load.seconds + drain_seconds, self._is_over)
        assert self._served is not None, "the load is not over"
        return Outcome(
            self._fates,
            self._system.engines,
            self._served,
            self._clock.now,
            self._clock.events,
        )

    def _look(self) -> None:
        engines = self._system.engines
        whole = sum(service_tokens(each.prompt_tokens, each.generated_tokens) for each in engines)
        self._served = whole / self._load.seconds

    def _is_over(self) -> bool:
        arrived = self._next == len(self._load.asked)
        return arrived and not self._open and self._served is not None

    def _arrive(self) -> None:
        """Only the next arrival lies on the clock."""
        if self._next < len(self._load.asked):
            self._clock.call_at(self._load.asked[self._next].at, self._arrived)

    def _arrived(self) -> None:
        asked = self._load.asked[self._next]
        self._next += 1
        self._submit(asked)
        self._arrive()

    def _submit(self, asked: RequestSpec) -> None:
        self._open += self._load.awaited(asked)
        self._fates.append(self._system.submit(asked))

    def _ended(self, fate: SimulatedRequest) -> None:
        self._open -= self._load.awaited(fate.spec)
        if fate.spec.repeats:
            again = self._clock.now + (RETRY_SECONDS if fate.refused else 0.0)
            if again < self._load.seconds:
                self._clock.call_at(again, partial(self._submit, replace(fate.spec, at=again)))


@cache
def capacity(worker: StepModel, sizes: tuple[RequestSpec, ...]) -> float:
    """Requests per second that a worker completes while many of these lengths wait."""
    asked = [replace(each, at=0.0) for each in sizes]
    outcome = SimulationRun(
        with_policy(Fcfs), SimulatedCluster((worker,)), Workload(asked, 0.1)
    ).run(inf)
    return len(asked) / outcome.ended

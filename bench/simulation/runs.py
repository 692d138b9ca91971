"""A run of a workload against a system, until the last request has ended or time is over."""

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

SETTLING_SECONDS = 1.0  # a system runs for so long before its workload begins
RETRY_SECONDS = 1.0  # after which a refused client asks again


@dataclass(frozen=True)
class Outcome:
    """The result of a run; times are seconds of the virtual clock."""

    requests: Sequence[SimulatedRequest]
    engines: Sequence[SimulatedEngine]
    served: float  # virtual tokens per second while requests came in
    ended: float  # when the run was over
    events: int  # that the virtual clock ran


class SimulationRun:
    """Submits a workload's requests to a system at their times, and collects them.

    It owns the clock, the place in the workload and the requests.
    """

    def __init__(self, build: Build, cluster: SimulatedCluster, workload: Workload) -> None:
        self._clock, self._workload = VirtualClock(-SETTLING_SECONDS), workload
        self._requests: list[SimulatedRequest] = []
        self._unfinished = 0
        self._next = 0
        self._served: float | None = None  # while requests come in
        self._system: System = build(cluster, self._clock, self._on_ended)

    def run(self, drain_seconds: float) -> Outcome:
        """Run until all awaited requests have ended, at most `drain_seconds` after the workload."""
        self._clock.call_at(self._workload.seconds, self._measure_service)
        self._schedule_arrival()
        self._clock.run(self._workload.seconds + drain_seconds, self._is_over)
        assert self._served is not None, "the workload is not over"
        return Outcome(
            self._requests,
            self._system.engines,
            self._served,
            self._clock.now,
            self._clock.events,
        )

    def _measure_service(self) -> None:
        engines = self._system.engines
        service = sum(service_tokens(each.prompt_tokens, each.generated_tokens) for each in engines)
        self._served = service / self._workload.seconds

    def _is_over(self) -> bool:
        arrived = self._next == len(self._workload.specs)
        return arrived and not self._unfinished and self._served is not None

    def _schedule_arrival(self) -> None:
        """Put the next arrival on the clock; the later ones are not there yet."""
        if self._next < len(self._workload.specs):
            self._clock.call_at(self._workload.specs[self._next].at, self._on_arrival)

    def _on_arrival(self) -> None:
        spec = self._workload.specs[self._next]
        self._next += 1
        self._submit(spec)
        self._schedule_arrival()

    def _submit(self, spec: RequestSpec) -> None:
        self._unfinished += self._workload.awaited(spec)
        self._requests.append(self._system.submit(spec))

    def _on_ended(self, request: SimulatedRequest) -> None:
        self._unfinished -= self._workload.awaited(request.spec)
        if request.spec.repeats:
            again = self._clock.now + (RETRY_SECONDS if request.refused else 0.0)
            if again < self._workload.seconds:
                self._clock.call_at(again, partial(self._submit, replace(request.spec, at=again)))


@cache
def capacity(worker: StepModel, sizes: tuple[RequestSpec, ...]) -> float:
    """Requests per second that a worker completes while many of these sizes wait."""
    specs = [replace(each, at=0.0) for each in sizes]
    outcome = SimulationRun(
        with_policy(Fcfs), SimulatedCluster((worker,)), Workload(specs, 0.1)
    ).run(inf)
    return len(specs) / outcome.ended

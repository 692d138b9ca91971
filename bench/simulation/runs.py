"""One run: a load against a system, until the last request has ended or the time is over."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

from bench.simulation.baselines import Fcfs
from bench.simulation.clock import Clock
from bench.simulation.engine import Engine
from bench.simulation.loads import Load
from bench.simulation.request import Asked, Fate
from bench.simulation.step_model import StepModel
from bench.simulation.systems import Build, Plant, System, behind
from dispatcher.fair_queue import service

SETTLING_SECONDS = 1.0  # for which a system has been there when its load begins
RETRY_SECONDS = 1.0  # after which a client asks again that was refused


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    fates: Sequence[Fate]
    engines: Sequence[Engine]
    served: float  # virtual tokens per second while the load went on
    ended: float  # when the run was over
    events: int


class Run:
    """Owns the clock, the load's position, and the fates."""

    def __init__(self, build: Build, plant: Plant, load: Load) -> None:
        self._clock, self._load = Clock(-SETTLING_SECONDS), load
        self._fates: list[Fate] = []
        self._open = 0
        self._next = 0
        self._served: float | None = None  # until the load is over
        self._system: System = build(plant, self._clock, self._ended)

    def run(self, drain_seconds: float) -> Outcome:
        """Until all that are awaited have ended, at most `drain_seconds` after the load."""
        self._clock.at(self._load.seconds, self._look)
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
        whole = sum(service(each.prompt_tokens, each.generated_tokens) for each in engines)
        self._served = whole / self._load.seconds

    def _is_over(self) -> bool:
        arrived = self._next == len(self._load.asked)
        return arrived and not self._open and self._served is not None

    def _arrive(self) -> None:
        """Only the next arrival lies on the clock."""
        if self._next < len(self._load.asked):
            self._clock.at(self._load.asked[self._next].at, self._arrived)

    def _arrived(self) -> None:
        asked = self._load.asked[self._next]
        self._next += 1
        self._submit(asked)
        self._arrive()

    def _submit(self, asked: Asked) -> None:
        self._open += self._load.awaited(asked)
        self._fates.append(self._system.submit(asked))

    def _ended(self, fate: Fate) -> None:
        self._open -= self._load.awaited(fate.asked)
        if fate.asked.repeats:
            again = self._clock.now + (RETRY_SECONDS if fate.refused else 0.0)
            if again < self._load.seconds:
                self._clock.at(again, partial(self._submit, replace(fate.asked, at=again)))


@cache
def capacity(worker: StepModel, sizes: tuple[Asked, ...]) -> float:
    """Requests per second that a worker completes while many of these lengths wait."""
    asked = [replace(each, at=0.0) for each in sizes]
    outcome = Run(behind(Fcfs), Plant((worker,)), Load(asked, 0.1)).run(inf)
    return len(asked) / outcome.ended

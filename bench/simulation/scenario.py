"""What a scenario is: figures with goals, and what one seed makes of them for each system."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from simulation.step_model import StepModel

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Figure:
    """One measure, the goal that Millstream is held against, and what others were seen to reach."""

    key: str
    words: str
    goal: float | None = None
    better: Better = "lower"
    known: str = ""
    x: float | None = None  # where it lies on a curve of figures of one scenario

    def met(self, value: float) -> bool:
        assert self.goal is not None
        return value <= self.goal if self.better == "lower" else value >= self.goal

    def worst(self, values: Sequence[float]) -> float:
        return max(values) if self.better == "lower" else min(values)


@dataclass(frozen=True)
class Setting:
    """What every run of the program shares."""

    worker: StepModel
    traces: Path  # the directory of the CSVs


Values = Mapping[str, Mapping[str, float]]  # by system, then by a figure's key
Measure = Callable[[Setting, int], Values]  # one seed


@dataclass(frozen=True)
class Scenario:
    """A system may lack figures that mean nothing there."""

    name: str
    words: str
    figures: tuple[Figure, ...]
    measure: Measure

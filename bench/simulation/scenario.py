"""Definitions of scenarios: figures with goals, and a function that measures one seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from simulation.step_model import StepModel

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Figure:
    """A measure, the goal that Millstream is held against, and what others are known to reach.

    `words` describe it for people; `key` names it in a measure's values.
    """

    key: str
    words: str
    goal: float | None = None
    better: Better = "lower"
    known: str = ""
    x: float | None = None  # its place on a curve of one scenario's figures

    def met(self, value: float) -> bool:
        """True if a value meets the goal, which must be set."""
        assert self.goal is not None
        return value <= self.goal if self.better == "lower" else value >= self.goal

    def worst(self, values: Sequence[float]) -> float:
        """The worst of some values: the highest where lower is better, else the lowest."""
        return max(values) if self.better == "lower" else min(values)


@dataclass(frozen=True)
class Setting:
    """The settings that all scenarios of one invocation share."""

    worker: StepModel
    traces: Path  # the directory of the CSVs


Values = Mapping[str, Mapping[str, float]]  # by system, then by a figure's key
Measure = Callable[[Setting, int], Values]  # one seed


@dataclass(frozen=True)
class Scenario:
    """A named load with the figures that are measured under it.

    A system may lack figures that mean nothing there.
    """

    name: str
    words: str
    figures: tuple[Figure, ...]
    measure: Measure

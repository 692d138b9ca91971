"""What a planner has decided: machines to start and to end, each with its reason. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MachineStart:
    """A machine of a type for a model that there is to be, under a new id, and why."""

    type: str
    model: str
    reason: str


@dataclass(frozen=True)
class MachineEnd:
    """A machine that is wanted no longer, and why."""

    machine: str
    model: str
    reason: str


@dataclass(frozen=True)
class FleetDecision:
    """What is to change in the plan, and by model why it is as it will be.

    All of it is one step: who stores a part of it stores all. What is neither started nor ended
    stays as it is.
    """

    starts: Sequence[MachineStart] = ()
    ends: Sequence[MachineEnd] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

"""A planner's decision: machines to start and to end, each with its reason. Pure."""

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
    """The changes of a plan, and by model the reason why it will be as it is then.

    All of it is one step: who stores a part of it stores all. What is neither started nor ended
    stays as it is.
    """

    starts: Sequence[MachineStart] = ()
    ends: Sequence[MachineEnd] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

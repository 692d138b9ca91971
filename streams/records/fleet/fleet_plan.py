"""The machines that are wanted, as the fleet service has decided. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from streams import messages, subjects
from streams.records.cas.cas_record import CasRecord
from streams.records.fleet.cold_start import ColdStart


@dataclass(frozen=True)
class WantedMachine:
    """A machine of a type for a model, why it is wanted, and until when (epoch seconds)."""

    type: str
    model: str
    reason: str
    expires_at: float

    def is_for(self, type_name: str, model: str) -> bool:
        """Return True if the machine is of this type and for this model."""
        return (self.type, self.model) == (type_name, model)


@dataclass(frozen=True)
class FleetChange:
    """A machine that was ordered or ended at a time (epoch seconds), and why."""

    at: float
    action: Literal["start", "end"]
    machine: str
    type: str
    model: str
    reason: str


@dataclass(frozen=True)
class FleetPlan(CasRecord):
    """The wanted machines by id. An id stands for one machine: each new one has a new id.

    `changes` are the last ones, the oldest first. `reasons` say of each model why its machines are
    as they are. `cold_starts` has, by model, how long each takes from no worker to its first; only
    of models that rest without workers and are woken by a request. `load_seconds` has, by model and
    machine type, the time from a worker's start to its first heartbeat.
    """

    machines: Mapping[str, WantedMachine] = field(default_factory=dict)
    changes: Sequence[FleetChange] = field(default_factory=list)
    reasons: Mapping[str, str] = field(default_factory=dict)
    cold_starts: Mapping[str, ColdStart] = field(default_factory=dict)
    load_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the plan that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: dict[str, Any] = messages.unpack(data)
        machines = {
            subjects.token(name): messages.from_wire(WantedMachine, each)
            for name, each in wire["machines"].items()
        }
        cold_starts = wire.get("cold_starts", {}).items()
        return cls(
            machines=machines,
            changes=[messages.from_wire(FleetChange, each) for each in wire.get("changes", ())],
            reasons=wire.get("reasons", {}),
            cold_starts={k: messages.from_wire(ColdStart, v) for k, v in cold_starts},
            load_seconds=wire.get("load_seconds", {}),
            revision=revision,
        )

    def wanted_at(self, now: float) -> dict[str, WantedMachine]:
        """Return the machines that are wanted at a time, by id."""
        return {name: each for name, each in self.machines.items() if now < each.expires_at}

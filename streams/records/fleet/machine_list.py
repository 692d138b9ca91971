"""The provider's own list of machines: what it is about to start, has, and is ending. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from streams import messages, subjects
from streams.records.cas.cas_record import CasRecord
from streams.records.fleet.machine_types import MachineType
from streams.records.fleet.model_policy import ModelPolicy


class MachineState(StrEnum):
    """State of a machine, or the reason why a wanted one does not exist."""

    UNKNOWN_TYPE = "unknown_type"  # the provider has no such type
    OUT_OF_STOCK = "out_of_stock"  # the provider has no more of the type
    QUOTA_REACHED = "quota_reached"  # as many of the type run as may
    BOOTING = "booting"
    RUNNING = "running"
    DRAINING = "draining"  # it is wanted no longer
    RECLAIMING = "reclaiming"  # the provider takes it back
    RECLAIMED = "reclaimed"

    @property
    def is_refused(self) -> bool:
        """True if there is no machine; it is started once there is one to be had."""
        return self in (self.UNKNOWN_TYPE, self.OUT_OF_STOCK, self.QUOTA_REACHED)

    @property
    def exists(self) -> bool:
        """True if there is a machine, which counts against stock and quota and costs money."""
        return not self.is_refused and self is not self.RECLAIMED

    @property
    def is_ending(self) -> bool:
        """True if the machine's worker drains."""
        return self in (self.DRAINING, self.RECLAIMING)


@dataclass(frozen=True)
class Machine:
    """A machine of the plan, as its provider knows it.

    Times are epoch seconds: `created_at` is when it was asked for, from when on it is paid, and
    `changed_at` when it came into its state. `crashes` counts the times that its worker has died
    and was started again.
    """

    type: str
    model: str
    state: MachineState
    created_at: float
    changed_at: float
    crashes: int = 0


@dataclass(frozen=True)
class MachineList(CasRecord):
    """The types that a provider offers, and its machines by the ids of the plan.

    `policies` are those of the table `[fleet]`, by model, and `policy` that of any other one.
    `budget_per_hour` is the most that all machines may cost in an hour, as types' prices are; None:
    any amount.
    """

    types: Mapping[str, MachineType] = field(default_factory=dict)
    machines: Mapping[str, Machine] = field(default_factory=dict)
    policies: Mapping[str, ModelPolicy] = field(default_factory=dict)
    policy: ModelPolicy = field(default_factory=ModelPolicy)
    budget_per_hour: int | None = None

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the list that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: dict[str, Any] = messages.unpack(data)
        types = {k: messages.from_wire(MachineType, each) for k, each in wire["types"].items()}
        machines = {
            subjects.token(name): messages.from_wire(
                Machine, {**each, "state": MachineState(each["state"])}
            )
            for name, each in wire["machines"].items()
        }
        return cls(
            types=types,
            machines=machines,
            policies={k: ModelPolicy.from_map(v) for k, v in wire.get("policies", {}).items()},
            policy=ModelPolicy.from_map(wire.get("policy", {})),
            budget_per_hour=wire.get("budget_per_hour"),
            revision=revision,
        )

    def policy_of(self, model: str) -> ModelPolicy:
        """Return how many workers a model may have."""
        return self.policies.get(model, self.policy)

    def in_state(self, *states: MachineState) -> list[str]:
        """Return the ids of the machines that are in one of these states."""
        return [name for name, machine in self.machines.items() if machine.state in states]

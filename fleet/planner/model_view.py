"""One model as it is planned: its machines and what they carry, and what is to change. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from fleet.planner.fleet_decision import MachineEnd, MachineStart
from fleet.planner.fleet_state import MachineCapacity, PlannedModel
from fleet.planner.machine_phases import PhasedMachine
from fleet.planner.type_offers import TypeOffer, find_offers
from streams.records.fleet.fleet_orders import MachineOrder
from streams.records.fleet.machine_types import MachineType


@dataclass(frozen=True)
class ModelView:
    """One model at one time: its machines in their phases, and the types that may be started.

    `types` are all there are, `open_types` those that are not paused. `somebody_is_heard` is False
    while no worker of the fleet is heard.
    """

    name: str
    model: PlannedModel
    machines: Sequence[PhasedMachine]
    capacities: Mapping[str, MachineCapacity]
    types: Mapping[str, MachineType]
    open_types: Mapping[str, MachineType]
    overrides: Sequence[MachineOrder]
    somebody_is_heard: bool

    @property
    def counted(self) -> list[PhasedMachine]:
        """The machines that carry their share, or will in time."""
        return [machine for machine in self.machines if machine.phase.counts]

    @property
    def soonest(self) -> float:
        """Seconds from an order to a machine that serves, of the type that is quickest."""
        seconds = (
            kind.boot_seconds + self.model.load_seconds.get(name, 0.0)
            for name, kind in self.open_types.items()
        )
        return min(seconds, default=0.0)

    def is_spot(self, machine: PhasedMachine) -> bool:
        """Return True if a machine may be taken back."""
        kind = self.types.get(machine.type)
        return kind is not None and kind.spot

    def carried(self, machines: Iterable[PhasedMachine]) -> float:
        """Return the tokens a second that machines carry; inf if nobody knows of one of them."""
        capacities = (self.capacities.get(machine.type) for machine in machines)
        return sum(each.tokens_per_second if each else inf for each in capacities)

    def offers(self, left: Mapping[str, float], *, firm: bool) -> list[TypeOffer]:
        """Return the types that may be started, without those of overrides; no spot if `firm`."""
        overridden = {override.type for override in self.overrides}
        return [
            offer
            for offer in find_offers(self.open_types, self.model, self.capacities, left)
            if offer.name not in overridden and not (firm and offer.kind.spot)
        ]


@dataclass
class ModelChanges:
    """The changes for one model, in the order of urgency, and why it is as it is."""

    starts: list[MachineStart] = field(default_factory=list)
    ends: list[MachineEnd] = field(default_factory=list)
    reason: str = ""
    is_woken: bool = False  # it had no machine that counts

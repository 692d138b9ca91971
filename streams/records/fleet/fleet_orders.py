"""Orders of operators to the fleet: machines by hand, and pauses of planning. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from streams import messages
from streams.records.cas.cas_record import CasRecord


@dataclass(frozen=True)
class MachineOrder:
    """An order of so many machines of a type for a model, until `expires_at` (epoch seconds)."""

    type: str
    model: str
    count: int
    expires_at: float


@dataclass(frozen=True)
class FleetOrders(CasRecord):
    """All orders, at most one for each type and model; no decision is made before `paused_until`.

    The time is in epoch seconds, 0 without a pause.
    """

    machines: Sequence[MachineOrder] = field(default_factory=list)
    paused_until: float = 0.0

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the orders that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: Mapping[str, Any] = messages.unpack(data)
        machines = [messages.from_wire(MachineOrder, each) for each in wire["machines"]]
        return cls(machines=machines, paused_until=wire["paused_until"], revision=revision)

    def with_order(self, order: MachineOrder, now: float) -> Self:
        """Return the orders with this one in place of an earlier one for its type and model.

        Those that are over at `now` are left out.
        """
        kept = [
            each
            for each in self.valid_at(now)
            if (each.type, each.model) != (order.type, order.model)
        ]
        return replace(self, machines=[*kept, order])

    def valid_at(self, now: float) -> list[MachineOrder]:
        """Return the orders that hold at a time."""
        return [each for each in self.machines if now < each.expires_at]

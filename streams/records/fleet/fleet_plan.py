"""The machines that are wanted, whoever wants them. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from streams import messages, subjects
from streams.records.cas.cas_record import CasRecord


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
class FleetPlan(CasRecord):
    """The wanted machines by id. An id stands for one machine: each new one has a new id."""

    machines: Mapping[str, WantedMachine] = field(default_factory=dict)

    @classmethod
    def unpack(cls, data: bytes, revision: int) -> Self:
        """Return the plan that `pack` encoded; raises ValueError or TypeError for other bytes."""
        wire: dict[str, Any] = messages.unpack(data)
        machines = {
            subjects.token(name): messages.from_wire(WantedMachine, each)
            for name, each in wire["machines"].items()
        }
        return cls(machines=machines, revision=revision)

    def wanted_at(self, now: float) -> dict[str, WantedMachine]:
        """Return the machines that are wanted at a time, by id."""
        return {name: each for name, each in self.machines.items() if now < each.expires_at}

    def with_machines(
        self, wanted: WantedMachine, new_ids: Iterable[str], ended: Collection[str], now: float
    ) -> Self:
        """Return the plan with as many machines like `wanted` as there are `new_ids`, and no more.

        Those of its type and model that are wanted already stay, the oldest first, with the new
        reason and end, unless they have `ended`; new ids stand for what is missing. What is wanted
        no longer at `now` is left out.
        """
        names = list(new_ids)
        current = self.wanted_at(now)
        others = {k: v for k, v in current.items() if not v.is_for(wanted.type, wanted.model)}
        kept = [name for name in current if name not in others and name not in ended]
        chosen = [*kept, *names][: len(names)]
        return replace(self, machines={**others, **dict.fromkeys(chosen, wanted)})

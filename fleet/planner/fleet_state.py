"""The fleet as a planner is told of it: what is asked for, and what there is. Pure.

None stands for what is not known; it is never taken for 0. Times are epoch seconds, rates are
prompt and output tokens a second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streams.records.fleet.fleet_orders import MachineOrder
from streams.records.fleet.fleet_plan import WantedMachine
from streams.records.fleet.machine_list import Machine
from streams.records.fleet.machine_types import MachineType
from streams.records.fleet.model_policy import ModelPolicy


@dataclass(frozen=True)
class PriorityDemand:
    """The demand for one model at one priority.

    The rates are of what was accepted and of what was refused for want of capacity, over some ten
    seconds: a longer mean hides bursts, for which the planner keeps room. `queued` and
    `queued_tokens` are what waits for a worker; the earliest deadline of it is `oldest_deadline`,
    None also where nothing waits.
    """

    accepted_tokens_per_second: float | None = None
    refused_tokens_per_second: float | None = None
    queued: int | None = None
    queued_tokens: float | None = None
    oldest_deadline: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """The rate that arrives, refused or not; None if either is not known."""
        if self.accepted_tokens_per_second is None or self.refused_tokens_per_second is None:
            return None
        return self.accepted_tokens_per_second + self.refused_tokens_per_second

    @property
    def is_none_asked_for(self) -> bool:
        """True if somebody has told that nothing arrives and nothing waits."""
        return self.tokens_per_second == 0 and self.queued == 0


@dataclass(frozen=True)
class MachineCapacity:
    """The load that one machine of a type carries of a model within its goal, as requests are now.

    `source` says in a word who has told it, such as `bench`.
    """

    tokens_per_second: float
    source: str


@dataclass(frozen=True)
class PlannedModel:
    """A model: its policy, what is asked of it by priority, and what machines carry, by type.

    `load_seconds` is, by type, the time from the start of a worker to a model that has warmed up.

    `running` is how many requests run on its workers, `output_share` the share of its tokens that
    is generated. `memory` is the bytes that a machine must have for it.
    """

    policy: ModelPolicy = field(default_factory=ModelPolicy)
    demand: Mapping[str, PriorityDemand] = field(default_factory=dict)
    capacities: Mapping[str, MachineCapacity] = field(default_factory=dict)
    running: int | None = None
    output_share: float | None = None
    memory: int | None = None
    load_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_none_asked_for(self) -> bool:
        """True if it is known that nothing arrives, waits or runs."""
        asked = (each.is_none_asked_for for each in self.demand.values())
        return bool(self.demand) and all(asked) and self.running == 0

    @property
    def is_asked_for(self) -> bool:
        """True if it is known that something waits or arrives."""
        return any(each.queued or each.tokens_per_second for each in self.demand.values())

    @property
    def queued(self) -> int:
        """The number of requests that are known to wait for a worker."""
        return sum(each.queued or 0 for each in self.demand.values())

    @property
    def oldest_deadline(self) -> float | None:
        """The earliest deadline of what waits."""
        found = (each.oldest_deadline for each in self.demand.values())
        return min((each for each in found if each is not None), default=None)


@dataclass(frozen=True)
class HeardWorker:
    """The last word of a machine's worker, and when it came; there is one once its model is warm.

    `tokens_per_second` is what it generates for its `running` requests.
    """

    heard_at: float
    running: int
    max_sequences: int
    tokens_per_second: float


@dataclass(frozen=True)
class FleetState:
    """All that a decision follows from.

    `wanted` is the plan that holds, by id: its machines in `machines`, the provider's list, are
    started or will be; any other is on its way out. `workers` are by the id of their machine.
    `budget_per_hour` is money as types' prices are, None: any amount.
    """

    types: Mapping[str, MachineType]
    models: Mapping[str, PlannedModel]
    wanted: Mapping[str, WantedMachine] = field(default_factory=dict)
    machines: Mapping[str, Machine] = field(default_factory=dict)
    workers: Mapping[str, HeardWorker] = field(default_factory=dict)
    overrides: Sequence[MachineOrder] = ()
    budget_per_hour: int | None = None
    is_paused: bool = False

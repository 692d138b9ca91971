"""Offers of machine types for a model, and the cheapest of them for a need. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from fleet.planner.fleet_state import FleetState, MachineCapacity, PlannedModel
from streams.records.fleet.machine_types import MachineType


@dataclass(frozen=True)
class TypeOffer:
    """A type that can be had for a model: at most `available` machines, inf: any number.

    `capacity` None: nobody knows yet what such a machine carries.
    """

    kind: MachineType
    capacity: MachineCapacity | None
    available: float
    load_seconds: float = 0.0

    @property
    def name(self) -> str:
        """Name of the type."""
        return self.kind.name

    @property
    def ready_seconds(self) -> float:
        """Time from the order to a machine that serves."""
        return self.kind.boot_seconds + self.load_seconds

    @property
    def tokens_per_second(self) -> float:
        """The capacity of one machine, which must be known."""
        assert self.capacity
        return self.capacity.tokens_per_second

    @property
    def money_per_token(self) -> float:
        """The price of an hour for each token per second."""
        return self.kind.price_per_hour / self.tokens_per_second


@dataclass
class TypeStock:
    """The number of machines of each type that there may be more; decisions take from it."""

    left: dict[str, float]

    @classmethod
    def of(cls, state: FleetState) -> "TypeStock":
        """Return what stock and quotas leave, with all that exists or is ordered taken off."""
        made = (each.type for each in state.machines.values() if each.state.exists)
        ordered = (each.type for k, each in state.wanted.items() if k not in state.machines)
        counts = Counter([*made, *ordered])
        return cls({name: _limit(kind) - counts[name] for name, kind in state.types.items()})

    def take(self, type_name: str) -> None:
        """Take one machine off."""
        self.left[type_name] -= 1


def _limit(kind: MachineType) -> float:
    return min(each for each in (kind.stock, kind.quota, inf) if each is not None)


def find_offers(
    types: Mapping[str, MachineType],
    model: PlannedModel,
    capacities: Mapping[str, MachineCapacity],
    left: Mapping[str, float],
) -> list[TypeOffer]:
    """Return the types that a model may have, that hold it, and of which there are some `left`."""
    return [
        TypeOffer(kind, capacities.get(name), left.get(name, 0), model.load_seconds.get(name, 0.0))
        for name, kind in types.items()
        if left.get(name, 0) >= 1 and _holds(kind, model) and _carries(capacities.get(name))
    ]


def _holds(kind: MachineType, model: PlannedModel) -> bool:
    return kind.memory is None or model.memory is None or model.memory <= kind.memory


def _carries(capacity: MachineCapacity | None) -> bool:
    """True unless it is known that not even one request keeps its goal there."""
    return capacity is None or capacity.tokens_per_second > 0


def choose_first(
    offers: Iterable[TypeOffer], deadline: float | None, now: float
) -> TypeOffer | None:
    """Return the cheapest type that serves before a deadline, or else the one that serves first."""
    in_time = [o for o in offers if deadline is None or now + o.ready_seconds <= deadline]
    if in_time:
        return min(in_time, key=lambda o: (o.kind.price_per_hour, o.ready_seconds))
    return min(offers, key=lambda o: (o.ready_seconds, o.kind.price_per_hour), default=None)


def choose_cheapest(need: float, offers: Sequence[TypeOffer]) -> list[TypeOffer]:
    """Return the machines, each by its offer, that carry a need for the least money.

    It fills up with whole machines of the types by money per token, and tries each type for the
    rest: never dearer than the best single type. All that there is where that is not enough. One
    machine is taken to carry anything if nobody knows what any machine carries.
    """
    if need <= 0 or not offers:
        return []
    known = sorted((o for o in offers if o.capacity), key=lambda o: o.money_per_token)
    if not known:
        return [min(offers, key=lambda o: o.kind.price_per_hour)]
    choices = list[list[TypeOffer]]()
    filled, rest = list[TypeOffer](), need
    for offer in known:
        choices += _finished([], offer, need) + _finished(filled, offer, rest)
        whole = int(min(rest // offer.tokens_per_second, offer.available))
        filled = [*filled, *[offer] * whole]
        rest -= whole * offer.tokens_per_second
    return min(choices, key=_price, default=None) or _all(known)


def _finished(filled: Sequence[TypeOffer], offer: TypeOffer, rest: float) -> list[list[TypeOffer]]:
    """Return the choice in which machines of one type carry the rest, if there are enough."""
    count = ceil(rest / offer.tokens_per_second)
    return [[*filled, *[offer] * count]] if count <= offer.available else []


def _all(known: Iterable[TypeOffer]) -> list[TypeOffer]:
    """Return all machines that can be had, where no choice is enough."""
    return [offer for offer in known for _ in range(int(offer.available))]


def _price(offers: Iterable[TypeOffer]) -> int:
    return sum(offer.kind.price_per_hour for offer in offers)

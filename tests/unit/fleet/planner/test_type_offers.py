"""The cheapest machines for a need: enough of them, and never dearer than the best single type."""

from math import ceil, inf

from hypothesis import given
from hypothesis import strategies as st

from fleet.planner.fleet_state import MachineCapacity, PlannedModel
from fleet.planner.type_offers import TypeOffer, choose_cheapest, find_offers
from streams.records.fleet.machine_types import MachineType

OFFERS = st.lists(
    st.tuples(
        st.integers(1, 50), st.integers(10, 1000), st.one_of(st.just(inf), st.integers(0, 9))
    ),
    min_size=1,
    max_size=8,
)


def offer(name: str, price: int, carries: float, available: float = inf) -> TypeOffer:
    capacity = MachineCapacity(carries, "bench")
    return TypeOffer(MachineType(name, price_per_hour=price), capacity, available)


def names(chosen: list[TypeOffer]) -> list[str]:
    return sorted(each.name for each in chosen)


@given(st.floats(1.0, 5000.0), OFFERS)
def test_what_is_chosen_carries_the_need_for_no_more_than_the_best_type(
    need: float, kinds: list[tuple[int, int, float]]
) -> None:
    """Or else it is all that there is."""
    offers = [offer(f"t{n}", *facts) for n, facts in enumerate(kinds)]
    chosen = choose_cheapest(need, offers)
    for each in offers:
        assert chosen.count(each) <= each.available
    carried = sum(each.tokens_per_second for each in chosen)
    whole = sum(each.available * each.tokens_per_second for each in offers)
    assert carried >= min(need, whole) * (1 - 1e-9)
    singles = [
        ceil(need / each.tokens_per_second) * each.kind.price_per_hour
        for each in offers
        if ceil(need / each.tokens_per_second) <= each.available
    ]
    if singles:
        assert sum(each.kind.price_per_hour for each in chosen) <= min(singles)


def test_large_machines_carry_the_bulk_and_a_small_one_the_rest() -> None:
    """The large one is cheaper for each token, and too dear for a little."""
    offers = [offer("small", 10, 100), offer("large", 35, 400)]
    assert names(choose_cheapest(850.0, offers)) == ["large", "large", "small"]
    assert names(choose_cheapest(90.0, offers)) == ["small"]
    assert names(choose_cheapest(390.0, offers)) == ["large"]


def test_a_type_without_memory_for_the_model_is_not_offered() -> None:
    """Nor one that the policy does not name, that is used up, or that cannot keep the goal."""
    types = {
        "tight": MachineType("tight", memory=10),
        "wide": MachineType("wide", memory=30),
        "gone": MachineType("gone", memory=30),
        "weak": MachineType("weak", memory=30),
    }
    left = {"tight": inf, "wide": 2.0, "gone": 0.0, "weak": inf}
    capacities = {"weak": MachineCapacity(0.0, "bench")}
    found = find_offers(types, PlannedModel(memory=20), capacities, left)
    assert names(found) == ["wide"]

"""How demand becomes machines: bursts, holding, warm pools, spot, the budget, learning."""

from dataclasses import replace
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.planner.fleet_state import (
    HeardWorker,
    MachineCapacity,
    PlannedModel,
)
from streams.records.fleet.machine_types import MachineType
from streams.records.fleet.model_policy import ModelPolicy, WarmPool
from tests.unit.fleet.planner.small_fleet import BOOT, MODEL, SMALL, SmallFleet, asked, model_of


def test_more_demand_is_met_within_the_time_of_its_mean() -> None:
    """A second of it says little; a minute of it is believed."""
    fleet = SmallFleet({"small": SMALL})
    fleet.run(300, {MODEL: model_of(asked(80.0))})
    fleet.step({MODEL: model_of(asked(1900.0))})
    assert len(fleet.wanted) <= 2
    fleet.run(75, {MODEL: model_of(asked(1900.0))})
    assert fleet.counts() == {"small": 20}
    assert "tokens/s needed" in fleet.words()[-1]


def test_a_queue_that_waits_is_need_beside_what_arrives() -> None:
    """Else a burst that is over would be worked off by the machines for what comes after."""
    fleet = SmallFleet({"small": SMALL})
    fleet.run(300, {MODEL: model_of(asked(80.0))})
    before = len(fleet.wanted)
    fleet.step({MODEL: model_of(replace(asked(80.0, queued=90), queued_tokens=40_000.0))})
    assert len(fleet.wanted) >= before + 8


def test_demand_that_goes_and_comes_again_changes_nothing() -> None:
    """Capacity stays that would have been missed within the last ten minutes."""
    fleet = SmallFleet({"small": SMALL})
    high, low = {MODEL: model_of(asked(800.0))}, {MODEL: model_of(asked(80.0))}
    for _ in range(6):
        fleet.run(60, low)
        fleet.run(30, high)
    before = dict(fleet.wanted)
    for _ in range(10):
        fleet.run(60, low)
        fleet.run(30, high)
    assert set(before) == set(fleet.wanted)
    fleet.run(3000, low)
    assert fleet.counts() == {"small": 1}


def test_a_warm_pool_is_there_when_it_begins() -> None:
    """Machines are ordered one boot time before."""
    noon = datetime(2026, 3, 2, 12, tzinfo=UTC).timestamp()  # a Monday
    pool = WarmPool(12 * 3600, 13 * 3600, 3, (0,))
    fleet = SmallFleet({"small": SMALL}, now=noon - 100)
    models = {MODEL: model_of(asked(), warm_pools=[pool])}
    fleet.run(69, models)
    assert fleet.counts() == {}
    fleet.run(2, models)
    assert fleet.counts() == {"small": 3}
    fleet.now = noon + 3600
    fleet.run(301, models)
    assert fleet.counts() == {}


@given(st.integers(0, 86399), st.integers(0, 86399), st.integers(0, 7 * 86400))
def test_a_warm_pool_is_open_from_its_begin_to_its_end(begins: int, ends: int, at: int) -> None:
    """Over midnight if it ends before it begins; each of its days has it once."""
    pool = WarmPool(begins, ends, 1)
    length = (ends - begins) % 86400 or 86400
    assert pool.is_open_at(float(at)) == ((at - begins) % 86400 < length)


def test_priorities_are_kept_off_spot_machines() -> None:
    """Each share of the demand has machines that are not taken back, whatever they cost."""
    spot = replace(SMALL, name="spot", spot=True, price_per_hour=100)
    fleet = SmallFleet({"small": SMALL, "spot": spot})
    capacities = {name: MachineCapacity(100.0, "bench") for name in fleet.types}
    policy = ModelPolicy(max_workers=100, off_spot=("interactive",))
    demand = {"interactive": asked(160.0), "batch": asked(240.0)}
    model = PlannedModel(policy, demand, capacities, 1)
    fleet.run(300, {MODEL: model})
    assert fleet.counts() == {"small": 2, "spot": 3}


def test_growth_stops_at_the_budget() -> None:
    """The reason says so."""
    fleet = SmallFleet({"small": SMALL})
    fleet.run(60, {MODEL: model_of(asked(2000.0))}, budget_per_hour=4_500_000)
    assert fleet.counts() == {"small": 4}
    assert "the budget is spent" in fleet.decisions[-1][1].reasons[MODEL]


def test_at_the_budget_one_model_shrinks_before_another_grows() -> None:
    """What drains still costs money: the sum is never above the budget."""
    fleet = SmallFleet({"small": SMALL})
    budget = 5_000_000
    busy, calm = model_of(asked(400.0)), model_of(asked())
    fleet.run(100, {"a": busy, "b": calm}, budget_per_hour=budget)
    assert fleet.counts("a") == {"small": 5}
    fleet.run(700, {"a": calm, "b": busy}, budget_per_hour=budget)
    assert fleet.counts("b") == {"small": 5}
    assert fleet.counts("a") == {}


def test_a_budget_that_was_cut_ends_machines() -> None:
    """Though they are needed."""
    fleet = SmallFleet({"small": SMALL})
    fleet.run(60, {MODEL: model_of(asked(800.0))})
    fleet.run(60, {MODEL: model_of(asked(800.0))}, budget_per_hour=3_000_000)
    assert fleet.counts() == {"small": 3}


def test_what_machines_carry_is_learned_from_full_workers() -> None:
    """Until one is full, one machine is taken to carry everything, and the words say so."""
    fleet = SmallFleet({"small": SMALL})
    model = replace(model_of(asked(500.0), {}), output_share=0.25)
    fleet.run(40, {MODEL: model})
    assert fleet.counts() == {"small": 1}
    assert "is not known yet" in fleet.decisions[-1][1].reasons[MODEL]
    (name,) = fleet.wanted
    full = {name: HeardWorker(fleet.now, 10, 10, 25.0)}
    fleet.step({MODEL: model}, workers=full)
    assert len(fleet.wanted) >= 5
    assert "learned from full workers" in fleet.words()[-1]


@settings(max_examples=15)
@given(st.lists(st.floats(0, 3000), min_size=1, max_size=4))
def test_more_demand_never_wants_fewer_machines(rates: list[float]) -> None:
    """Of two fleets with the same past, the one that is asked for more has no fewer machines."""
    counts = []
    for last in (500.0, 1500.0):
        fleet = SmallFleet({"small": MachineType("small", None, BOOT, 1_000_000)})
        for rate in rates:
            fleet.run(20, {MODEL: model_of(asked(rate))})
        fleet.step({MODEL: model_of(asked(last))})
        counts.append(len(fleet.wanted))
    assert counts[0] <= counts[1]

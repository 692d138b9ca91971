"""Orders, plan and list of machines: read back as written, and changed."""

from dataclasses import replace

import pytest

from streams import subjects
from streams.records.fleet.cold_start import ColdStart
from streams.records.fleet.fleet_orders import FleetOrders, MachineOrder
from streams.records.fleet.fleet_plan import FleetChange, FleetPlan, WantedMachine
from streams.records.fleet.machine_list import Machine, MachineList, MachineState
from streams.records.fleet.machine_types import MachineType
from streams.records.fleet.model_policy import ModelPolicy, WarmPool
from streams.records.fleet.waking import InvalidWaking, Waking, parse_waking

WANTED = WantedMachine("small", "mock", "set by an operator", 100.0)


def test_records_read_back_as_they_were_written() -> None:
    """All that a planner and a provider know of each other goes through these bytes."""
    change = FleetChange(1.0, "start", "m-1", "small", "mock", "ten requests wait")
    plan = FleetPlan(
        machines={"m-1": WANTED},
        changes=[change],
        reasons={"mock": "idle"},
        cold_starts={"mock": ColdStart("small", 3.0, 0.5)},
        load_seconds={"mock": {"small": 0.5}},
    )
    assert FleetPlan.unpack(plan.pack(), 7) == replace(plan, revision=7)
    kind = MachineType("small", 2**30, 3.0, 600_000, "USD", 2, 3, True, 2.0, 60.0)
    machine = Machine("small", "mock", MachineState.BOOTING, 1.0, 2.0, 3)
    machines = MachineList(
        types={"small": kind},
        machines={"m-1": machine},
        policies={"mock": ModelPolicy(1, 4, 60.0, (WarmPool(0, 60, 2),))},
        budget_per_hour=9,
        policy=ModelPolicy(idle_seconds=9.0),
    )
    assert MachineList.unpack(machines.pack(), 9) == replace(machines, revision=9)
    orders = FleetOrders(machines=[MachineOrder("small", "mock", 2, 50.0)], paused_until=9.0)
    assert FleetOrders.unpack(orders.pack(), 3) == replace(orders, revision=3)


@pytest.mark.parametrize("kind", [FleetPlan, MachineList])
def test_a_machine_whose_id_is_no_token_is_refused(kind: type[FleetPlan | MachineList]) -> None:
    """It becomes the name of a file with credentials, and of subjects."""
    machine = Machine("small", "mock", MachineState.RUNNING, 1.0, 1.0)
    bad: FleetPlan | MachineList = (
        FleetPlan(machines={"../x": WANTED})
        if kind is FleetPlan
        else MachineList(machines={"../x": machine})
    )
    with pytest.raises(ValueError, match=r"\.\./x"):
        kind.unpack(bad.pack(), 1)


def test_an_order_replaces_the_one_for_its_type_and_model() -> None:
    """Others stay, unless they are over."""
    others = [MachineOrder("small", "other", 1, 100.0), MachineOrder("large", "mock", 1, 20.0)]
    orders = FleetOrders(machines=[*others, MachineOrder("small", "mock", 3, 100.0)])
    later = MachineOrder("small", "mock", 2, 200.0)
    assert orders.with_order(later, 10.0).machines == [*others, later]
    assert orders.with_order(later, 20.0).machines == [others[0], later]


def test_what_has_expired_is_wanted_no_longer() -> None:
    """The provider needs nobody to tell it."""
    plan = FleetPlan(machines={"a": WANTED})
    assert (plan.wanted_at(99.9), plan.wanted_at(100.0)) == ({"a": WANTED}, {})


@pytest.mark.parametrize(
    ("subject", "payload"),
    [
        (subjects.waking("other"), Waking("mock", "booting", 1.0).pack()),
        (subjects.waking("mock"), Waking("mock", "asleep", 1.0).pack()),
        (subjects.waking("mock"), Waking("mock", "booting", "soon").pack()),  # type: ignore[arg-type]
        (subjects.waking("mock"), b"\xff"),
    ],
)
def test_what_tells_of_no_wake_is_refused(subject: str, payload: bytes) -> None:
    """It would reach clients."""
    with pytest.raises(InvalidWaking):
        parse_waking(subject, {}, payload)


def test_a_wake_is_told_in_seconds_that_are_never_negative() -> None:
    """To a tenth; None while nobody can say."""
    waking = parse_waking(subjects.waking("mock"), {}, Waking("mock", "booting", 12.34).pack())
    assert [waking.seconds_left(now) for now in (10.0, 13.0)] == [2.3, 0.0]
    assert Waking("mock", "ordered").seconds_left(10.0) is None

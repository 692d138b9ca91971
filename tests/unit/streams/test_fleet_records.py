"""Plan and list of machines: read back as written, and changed."""

from dataclasses import replace

import pytest

from streams.records.fleet.fleet_plan import FleetPlan, WantedMachine
from streams.records.fleet.machine_list import Machine, MachineList, MachineState
from streams.records.fleet.machine_types import MachineType

WANTED = WantedMachine("small", "mock", "set by an operator", 100.0)


def test_records_read_back_as_they_were_written() -> None:
    """All that a planner and a provider know of each other goes through these bytes."""
    plan = FleetPlan(machines={"m-1": WANTED})
    assert FleetPlan.unpack(plan.pack(), 7) == replace(plan, revision=7)
    kind = MachineType("small", 2**30, 3.0, 600_000, "USD", 2, 3, True, 2.0, 60.0)
    machine = Machine("small", "mock", MachineState.BOOTING, 1.0, 2.0, 3)
    machines = MachineList(types={"small": kind}, machines={"m-1": machine})
    assert MachineList.unpack(machines.pack(), 9) == replace(machines, revision=9)


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


def test_the_oldest_machines_stay_when_fewer_are_wanted() -> None:
    """They are warm, and a new one would have to boot."""
    plan = FleetPlan().with_machines(WANTED, ["a", "b", "c"], (), 0.0)
    assert list(plan.machines) == ["a", "b", "c"]
    later = replace(WANTED, expires_at=200.0)
    fewer = plan.with_machines(later, ["d", "e"], (), 50.0)
    assert fewer.machines == {"a": later, "b": later}


def test_a_machine_that_has_ended_is_replaced() -> None:
    """An id is one machine's for good: what was reclaimed never comes back under it."""
    plan = FleetPlan().with_machines(WANTED, ["a", "b"], (), 0.0)
    assert list(plan.with_machines(WANTED, ["c", "d"], {"a"}, 0.0).machines) == ["b", "c"]


def test_machines_for_other_models_and_types_stay() -> None:
    """Each override is for one type and one model."""
    others = {"x": replace(WANTED, model="other"), "y": replace(WANTED, type="large")}
    plan = FleetPlan(machines=others).with_machines(WANTED, ["a"], (), 0.0)
    assert plan.with_machines(WANTED, [], (), 0.0).machines == others


def test_what_has_expired_is_wanted_no_longer() -> None:
    """It is left out of the next plan, too."""
    plan = FleetPlan(machines={"a": WANTED})
    assert (plan.wanted_at(99.9), plan.wanted_at(100.0)) == ({"a": WANTED}, {})
    late = replace(WANTED, model="other", expires_at=300.0)
    assert list(plan.with_machines(late, ["b"], (), 100.0).machines) == ["b"]

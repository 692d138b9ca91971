"""States of machines by the plan, the types and the time."""

import pytest

from millstream.up.machines.machine_life import (
    advance,
    next_change,
    resume,
    with_crash,
    without_worker,
)
from streams.records.fleet.fleet_plan import FleetPlan, WantedMachine
from streams.records.fleet.machine_list import MachineList, MachineState
from streams.records.fleet.machine_types import MachineType

FOREVER = 1e9


def offering(**facts: float | bool) -> MachineList:
    """A provider of the type `small` that has no machine yet."""
    kind = MachineType("small", **facts)  # type: ignore[arg-type]  # each test its own facts
    return MachineList(types={"small": kind})


def wanting(*names: str, kind: str = "small", until: float = FOREVER) -> FleetPlan:
    return FleetPlan(machines={name: WantedMachine(kind, "mock", "test", until) for name in names})


def states(machines: MachineList) -> dict[str, str]:
    return {name: machine.state.value for name, machine in machines.machines.items()}


def test_a_machine_boots_before_it_runs() -> None:
    """As long as its type says, from the order on."""
    plan, ordered = wanting("a"), advance(offering(boot_seconds=10), wanting("a"), 0)
    assert states(ordered) == {"a": "booting"}
    assert next_change(ordered, plan, 0) == 10
    assert advance(ordered, plan, 9.9) is ordered
    assert states(advance(ordered, plan, 10)) == {"a": "running"}


@pytest.mark.parametrize(
    ("limit", "state"), [("stock", "out_of_stock"), ("quota", "quota_reached")]
)
def test_what_there_is_no_more_of_is_refused_until_one_is_free(limit: str, state: str) -> None:
    """The planner sees why, and may choose another type; a place that is free again is used."""
    both = advance(offering(**{limit: 1}), wanting("a", "b"), 0)
    assert states(both) == {"a": "booting", "b": state}
    freed = advance(both, wanting("b"), 1)
    assert states(freed) == {"b": "booting"}
    assert freed.machines["b"].created_at == 1


def test_a_draining_machine_still_takes_a_place() -> None:
    """It exists, and is paid, until its worker has ended."""
    running = advance(advance(offering(stock=1), wanting("a"), 0), wanting("a"), 0)
    assert states(advance(running, wanting("b"), 1)) == {"a": "draining", "b": "out_of_stock"}


def test_a_type_that_is_not_offered_is_said_so() -> None:
    """The table may have changed since the plan was made."""
    assert states(advance(offering(), wanting("a", kind="huge"), 0)) == {"a": "unknown_type"}


def test_a_machine_that_boots_is_given_up_at_once() -> None:
    """It has no worker that could drain."""
    booting = advance(offering(boot_seconds=10), wanting("a"), 0)
    assert states(advance(booting, wanting(), 1)) == {}


def test_a_machine_that_boots_in_no_time_runs_at_once() -> None:
    """Nobody waits for the next look at the plan."""
    assert next_change(advance(offering(), wanting("a"), 5), wanting("a"), 5) == 5


def test_a_machine_drains_when_its_time_is_over() -> None:
    """An override by hand ends without anybody."""
    plan = wanting("a", until=50)
    running = advance(advance(offering(), plan, 0), plan, 0)
    assert next_change(running, plan, 1) == 50
    draining = advance(running, plan, 50)
    assert states(draining) == {"a": "draining"}
    assert states(without_worker(draining, "a", 51)) == {}


def test_a_machine_that_is_wanted_again_while_it_drains_ends_first() -> None:
    """Its worker takes no more work; it is started again under the same id afterwards."""
    running = advance(advance(offering(), wanting("a"), 0), wanting("a"), 0)
    draining = advance(running, wanting(), 1)
    assert advance(draining, wanting("a"), 2) is draining
    assert states(advance(without_worker(draining, "a", 3), wanting("a"), 3)) == {"a": "booting"}


def test_a_spot_machine_is_taken_back_once() -> None:
    """The plan's id stays ended; another one has to be wanted."""
    plan, kind = wanting("a"), offering(spot=True, notice_seconds=2, reclaim_after_seconds=60)
    running = advance(advance(kind, plan, 0), plan, 0)
    assert next_change(running, plan, 0) == 60
    reclaiming = advance(running, plan, 60)
    assert states(reclaiming) == {"a": "reclaiming"}
    reclaimed = without_worker(reclaiming, "a", 62)
    assert states(reclaimed) == {"a": "reclaimed"}
    assert advance(reclaimed, plan, 70) is reclaimed
    assert states(advance(reclaimed, wanting(), 71)) == {}


def test_a_new_provider_keeps_what_was_started_and_ends_what_was_ending() -> None:
    """Its machines are asked for once, however often the provider dies."""
    plan = wanting("a", "b", "c")
    running = advance(advance(offering(), plan, 0), plan, 0)
    left = advance(running, wanting("a", "b"), 1)
    found = resume(left, running.types)
    assert states(found) == {"a": "running", "b": "running"}
    assert found.machines["a"] is running.machines["a"]
    assert states(resume(left, {})) == {}


def test_crashes_are_counted() -> None:
    """A machine whose worker never stays is seen."""
    running = advance(advance(offering(), wanting("a"), 0), wanting("a"), 0)
    assert with_crash(with_crash(running, "a"), "a").machines["a"].crashes == 2
    assert running.in_state(MachineState.RUNNING) == ["a"]

"""Machines that do not come, are lost or are slow: others take their place, and nothing loops."""

from dataclasses import replace

from streams.records.fleet.machine_list import MachineState
from tests.unit.fleet.planner.small_fleet import BOOT, MODEL, SMALL, SmallFleet, asked, model_of


def test_a_type_that_is_out_of_stock_gives_way_to_another() -> None:
    """After a few seconds, in which the provider may get one."""
    fleet = SmallFleet(out_of_stock=frozenset({"small"}))
    fleet.run(10, {MODEL: model_of(asked(50.0, queued=3))})
    assert fleet.counts() == {"large": 1}
    assert any("not to be had" in words for words in fleet.words())


def test_a_machine_that_does_not_join_gives_way_to_another_type() -> None:
    """It is ended once some worker is heard, so that hearing is not what fails."""
    fleet = SmallFleet(failing=frozenset({"small"}))
    fleet.run(int(BOOT) + 60, {MODEL: model_of(asked(50.0, queued=3))})
    assert fleet.counts() == {"small": 1}
    fleet.run(3, {MODEL: model_of(asked(50.0, queued=3))})
    assert fleet.counts() == {"large": 1, "small": 1}
    fleet.run(int(BOOT) + 2, {MODEL: model_of(asked(50.0, queued=3))})
    assert fleet.counts() == {"large": 1}


def test_types_that_all_fail_are_tried_ever_more_seldom() -> None:
    """An hour with nothing to be had asks for a few machines, not for thousands."""
    fleet = SmallFleet(out_of_stock=frozenset({"small", "large"}))
    fleet.run(3600, {MODEL: model_of(asked(50.0, queued=3))})
    starts = sum(len(decision.starts) for _, decision in fleet.decisions)
    assert 6 <= starts <= 20
    assert "no machine can be had" in fleet.decisions[-1][1].reasons[MODEL]


def test_a_type_is_tried_again_once_it_has_worked() -> None:
    """A machine that joins ends the pause for good."""
    fleet = SmallFleet({"small": SMALL}, out_of_stock=frozenset({"small"}))
    fleet.run(10, {MODEL: model_of(asked(50.0, queued=3))})
    assert fleet.counts() == {}
    fleet.out_of_stock = frozenset()
    fleet.run(120, {MODEL: model_of(asked(50.0, queued=3))})
    assert fleet.counts() == {"small": 1}


def test_lost_beats_shoot_nothing_down() -> None:
    """Machines that their provider has count as they did, however long nobody hears them."""
    fleet = SmallFleet()
    models = {MODEL: model_of(asked(500.0))}
    fleet.run(200, models)
    before = dict(fleet.wanted)
    fleet.silent = set(before)
    fleet.run(300, models)
    assert fleet.wanted == before


def test_lost_beats_shoot_nothing_down_under_a_new_leader() -> None:
    """It gives each of them its time to join anew."""
    fleet = SmallFleet()
    models = {MODEL: model_of(asked(500.0))}
    fleet.run(200, models)
    before = set(fleet.wanted)
    fleet.silent = set(before)
    fleet.planner = type(fleet.planner)()
    fleet.run(60, models)
    assert set(fleet.wanted) == before


def test_one_machine_that_is_silent_while_others_are_heard_is_replaced() -> None:
    """It hangs, though its provider has it: after some minutes it counts no longer."""
    fleet = SmallFleet({"small": SMALL})
    models = {MODEL: model_of(asked(300.0))}
    fleet.run(200, models)
    lost, count = next(iter(fleet.wanted)), len(fleet.wanted)
    fleet.silent = {lost}
    fleet.run(300, models)
    assert lost in fleet.wanted
    fleet.run(70, models)
    assert lost not in fleet.wanted
    assert len(fleet.wanted) == count


def test_a_slow_machine_is_replaced_and_ends_after_that() -> None:
    """It does less than half of what its like does, for a minute."""
    fleet = SmallFleet({"small": SMALL})
    models = {MODEL: model_of(asked(300.0))}
    fleet.run(200, models)
    slow = next(iter(fleet.wanted))
    count = len(fleet.wanted)
    fleet.pace[slow] = 3.0
    fleet.run(62, models)
    assert slow in fleet.wanted
    assert len(fleet.wanted) == count + 1
    fleet.run(int(BOOT) + 121, models)
    assert slow not in fleet.wanted
    assert len(fleet.wanted) == count
    assert any("less than half" in words for words in fleet.words())


def test_a_machine_that_is_taken_back_is_replaced_at_once() -> None:
    """Its notice is shorter than a boot."""
    fleet = SmallFleet({"small": SMALL})
    models = {MODEL: model_of(asked(80.0))}
    fleet.run(100, models)
    (name,) = fleet.wanted
    machine = fleet.machines[name]
    fleet.machines[name] = replace(machine, state=MachineState.RECLAIMING)
    fleet.step(models)
    assert name not in fleet.wanted
    assert fleet.counts() == {"small": 1}


def test_machines_that_are_never_heard_are_bounded_and_given_up() -> None:
    """A broken model or wrong credentials: no worker at all is heard, and money is spent on it."""
    fleet, most = SmallFleet(failing=frozenset({"small", "large"})), 0
    models = {MODEL: model_of(asked(50.0, queued=3), max_workers=2)}
    for _ in range(3600):
        fleet.step(models)
        most = max(most, len(fleet.wanted))
    starts = sum(len(decision.starts) for _, decision in fleet.decisions)
    assert most <= 2
    assert 2 <= starts <= 20
    assert any("was never heard" in words for words in fleet.words())


def test_a_new_leader_ends_no_machine_whose_capacity_nobody_knows() -> None:
    """That it carries anything is as unknown as that the others do."""
    fleet = SmallFleet({"small": SMALL})
    fleet.run(100, {MODEL: model_of(asked(50.0), {}, min_workers=2)})
    assert fleet.counts() == {"small": 2}
    fleet.planner = type(fleet.planner)()
    fleet.run(50, {MODEL: model_of(asked(50.0), {})})
    assert fleet.counts() == {"small": 2}

"""The planner's rules, one by one, on a fleet that does as it is told."""

from dataclasses import replace

from streams.records.fleet.fleet_orders import MachineOrder
from tests.unit.fleet.planner.small_fleet import (
    BOOT,
    LARGE,
    MODEL,
    SMALL,
    SmallFleet,
    asked,
    model_of,
)

HOLD = 121  # seconds after which capacity that is not needed goes


def test_a_request_wakes_one_machine_of_the_cheapest_type() -> None:
    """However much waits: what arrives is known once the machine is there."""
    fleet = SmallFleet()
    decision = fleet.step({MODEL: model_of(asked(queued=500))})
    assert [start.type for start in decision.starts] == ["small"]
    assert "500 requests wait" in decision.starts[0].reason
    assert not fleet.step({MODEL: model_of(asked(queued=500))}).ends


def test_it_wakes_a_type_that_serves_before_the_oldest_deadline() -> None:
    """The cheapest one would come too late."""
    slow = replace(SMALL, boot_seconds=100.0)
    fleet = SmallFleet({"small": slow, "large": LARGE})
    waiting = replace(asked(queued=1), oldest_deadline=fleet.now + 60)
    fleet.step({MODEL: model_of(waiting)})
    assert fleet.counts() == {"large": 1}


def test_it_wakes_the_quickest_type_if_none_is_in_time() -> None:
    """Later than the deadline is better than never: more may come."""
    slow = replace(SMALL, boot_seconds=100.0)
    fleet = SmallFleet({"small": slow, "large": LARGE})
    fleet.step({MODEL: model_of(replace(asked(queued=1), oldest_deadline=fleet.now + 5))})
    assert fleet.counts() == {"large": 1}


def test_an_idle_model_goes_to_zero_and_stays_there() -> None:
    """Only what waits or arrives wakes it again."""
    fleet = SmallFleet()
    fleet.run(60, {MODEL: model_of(asked(200.0))})
    fleet.run(310, {MODEL: model_of(asked())})
    assert fleet.counts() == {}
    fleet.run(60, {MODEL: model_of(asked())})
    assert fleet.counts() == {}
    assert any("nothing was asked of it for 300 s" in words for words in fleet.words())


def test_what_is_not_known_is_not_zero() -> None:
    """Nobody tells what arrives: nothing is ended, nothing is started."""
    fleet = SmallFleet()
    fleet.run(60, {MODEL: model_of(asked(200.0))})
    before = fleet.counts()
    fleet.run(1000, {MODEL: model_of(asked(None, None))})
    assert fleet.counts() == before


def test_refused_requests_are_demand() -> None:
    """A model whose gateways refuse everything has no queue."""
    fleet = SmallFleet({"small": SMALL})
    refused = replace(asked(0.0), refused_tokens_per_second=850.0)
    fleet.run(120, {MODEL: model_of(refused)})
    assert fleet.counts()["small"] == 9


def test_the_least_and_the_most_workers_are_kept() -> None:
    """Whatever is asked for."""
    fleet = SmallFleet()
    fleet.run(400, {MODEL: model_of(asked(), min_workers=2)})
    assert fleet.counts() == {"small": 2}
    fleet = SmallFleet({"small": SMALL})
    fleet.run(60, {MODEL: model_of(asked(5000.0), max_workers=3)})
    assert fleet.counts() == {"small": 3}
    assert "at most 3 machines" in fleet.decisions[-1][1].reasons[MODEL]


def test_an_override_holds_until_it_expires() -> None:
    """It fixes the number of its type; the planner goes on with the others."""
    fleet = SmallFleet()
    override = MachineOrder("large", MODEL, 2, fleet.now + 60)
    fleet.run(60, {MODEL: model_of(asked(50.0))}, overrides=[override])
    assert fleet.counts() == {"large": 2}
    fleet.run(HOLD, {MODEL: model_of(asked(50.0))}, overrides=[override])
    assert fleet.counts() == {"large": 1}


def test_an_override_of_none_ends_all_of_its_type() -> None:
    """Others carry on instead."""
    fleet = SmallFleet()
    fleet.run(60, {MODEL: model_of(asked(50.0))})
    assert fleet.counts() == {"small": 1}
    none = MachineOrder("small", MODEL, 0, fleet.now + 60)
    fleet.run(2, {MODEL: model_of(asked(50.0))}, overrides=[none])
    assert fleet.counts() == {"large": 1}


def test_paused_nothing_changes() -> None:
    """Neither up nor down."""
    fleet = SmallFleet()
    fleet.run(100, {MODEL: model_of(asked(5000.0, queued=10))}, is_paused=True)
    assert fleet.counts() == {}
    assert "paused" in fleet.decisions[-1][1].reasons[MODEL]


def test_a_machine_that_is_on_its_way_is_not_bought_twice() -> None:
    """It counts from the order on, also for a planner that has just begun."""
    fleet = SmallFleet({"small": SMALL})
    fleet.run(5, {MODEL: model_of(asked(80.0))})
    fleet.planner = type(fleet.planner)()
    fleet.run(int(BOOT), {MODEL: model_of(asked(80.0))})
    assert fleet.counts() == {"small": 1}

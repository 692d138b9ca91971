"""A decision becomes the next plan, with its reasons."""

from itertools import count
from math import inf

from fleet.plan_step import MAX_CHANGES, apply_decision
from fleet.planner.fleet_decision import FleetDecision, MachineEnd, MachineStart
from streams.records.fleet.fleet_plan import FleetChange, FleetPlan, WantedMachine

OLD = WantedMachine("small", "mock", "it was needed", inf)


def test_what_is_started_gets_an_id_and_what_is_ended_goes() -> None:
    """Both with the reason that `fleet why` tells."""
    plan = FleetPlan(machines={"a": OLD, "b": OLD}, revision=7)
    decision = FleetDecision(
        [MachineStart("large", "mock", "a burst")],
        [MachineEnd("a", "mock", "idle"), MachineEnd("gone", "mock", "idle")],
        {"mock": "one is enough"},
    )
    changed = apply_decision(plan, decision, lambda: "c", 5.0)
    assert changed.machines == {"b": OLD, "c": WantedMachine("large", "mock", "a burst", inf)}
    assert changed.changes == [
        FleetChange(5.0, "end", "a", "small", "mock", "idle"),
        FleetChange(5.0, "start", "c", "large", "mock", "a burst"),
    ]
    assert (changed.reasons, changed.revision) == ({"mock": "one is enough"}, 7)


def test_the_history_is_bounded() -> None:
    """It is one record, which is read at each start."""
    ids, plan = map(str, count()), FleetPlan()
    for _ in range(MAX_CHANGES + 1):
        start = FleetDecision([MachineStart("small", "mock", "")])
        plan = apply_decision(plan, start, lambda: next(ids), 1.0)
    assert [each.machine for each in plan.changes][:: MAX_CHANGES - 1] == ["1", str(MAX_CHANGES)]

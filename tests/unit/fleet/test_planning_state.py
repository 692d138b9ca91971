"""What the planner is told is what is known: what nobody has told is not 0."""

from dataclasses import replace
from math import inf

import pytest

from fleet.planner.planner import Planner
from fleet.planning_state import build_state
from fleet.signals.signal_window import SignalWindow
from registry.models import mock_model
from streams.messages import Heartbeat, Pressure
from streams.records.fleet.curves import Curve, CurvePoint, CurveSource
from streams.records.fleet.fleet_orders import FleetOrders, MachineOrder
from streams.records.fleet.fleet_plan import FleetPlan, WantedMachine
from streams.records.fleet.machine_list import Machine, MachineList, MachineState
from streams.records.fleet.machine_types import MachineType
from streams.records.fleet.model_policy import ModelPolicy
from streams.records.fleet.step_times import StepTimes
from streams.subjects import Priority

NOW = 1000.0
KNOWN = MachineList(
    types={"small": MachineType("small")},
    machines={"m-1": Machine("small", "mock", MachineState.RUNNING, 1.0, 2.0)},
    policies={"mock": ModelPolicy(1, 4, 60.0)},
)
PLAN = FleetPlan(machines={"m-1": WantedMachine("small", "mock", "", inf)})


def beat(running: int) -> Heartbeat:
    return Heartbeat("m-1", "mock", "1", 1, 1, running, 1, 8, 1, 0, 5.0, type="small")


def pressure(queued: int) -> Pressure:
    told = {str(each): 0 for each in Priority} | {"standard": queued}
    return Pressure(
        "mock",
        1,
        told,
        {"standard": 0.0},
        arrived={each: (count, 10 * count, 90 * count) for each, count in told.items()},
        earliest_deadline=1_060_000,
        queued_tokens={"standard": 100 * queued},
    )


def test_what_nobody_tells_is_unknown() -> None:
    """A machine that runs and is not heard may be busy: nothing is shot down for it."""
    window = SignalWindow(10)
    state = build_state(
        KNOWN, PLAN, FleetOrders(), window, window.report(NOW, {}), {"mock": mock_model()}, {}
    )
    model = state.models["mock"]
    assert (model.running, model.is_none_asked_for) == (None, False)
    assert (state.wanted, state.machines) == (PLAN.machines, KNOWN.machines)


def test_what_is_told_is_there() -> None:
    """Demand, queue, deadline, what runs, the policy of the table, and orders that hold."""
    window = SignalWindow(10)
    window.add_pressure(pressure(0), NOW - 2)
    window.add_pressure(pressure(3), NOW - 1)
    window.add_heartbeat(beat(2), NOW - 1)
    orders = FleetOrders(
        machines=[MachineOrder("small", "mock", 2, NOW + 1), MachineOrder("old", "mock", 2, NOW)],
        paused_until=NOW + 5,
    )
    state = build_state(
        KNOWN, PLAN, orders, window, window.report(NOW, {}), {"mock": mock_model()}, {}
    )
    model = state.models["mock"]
    told = model.demand["standard"]
    assert (told.accepted_tokens_per_second, told.refused_tokens_per_second) == (300.0, 0.0)
    assert model.output_share == pytest.approx(0.9)
    assert (told.queued, told.queued_tokens, told.oldest_deadline) == (3, 300, 1060.0)
    assert (model.running, state.workers["m-1"].running) == (3, 2)
    assert (model.policy.min_workers, model.policy.max_workers) == (1, 4)
    assert state.overrides == [MachineOrder("small", "mock", 2, NOW + 1)]
    assert state.is_paused


def test_curves_say_what_a_machine_carries() -> None:
    """Of requests as they were measured, until some have ended, whatever the goal."""
    point = CurvePoint(4, 100, 50, 0.1, 0.01, 6.0)
    times = StepTimes(step_seconds=0.01)
    curve = Curve(
        "mock",
        "1",
        "small",
        CurveSource.BENCH,
        NOW,
        times,
        4,
        10_000,
        load_seconds=3,
        points=[point],
    )
    slow = replace(curve, times=StepTimes(latency_seconds=60, step_seconds=0.01))
    window = SignalWindow(10)
    learnt = replace(curve, source=CurveSource.LIVE, points=[])
    cases = ((curve, 4 / 0.5 * 150), (slow, 4 / 60.5 * 150), (learnt, None))
    for known, carried in cases:
        state = build_state(
            KNOWN,
            PLAN,
            FleetOrders(),
            window,
            window.report(NOW, {}),
            {"mock": mock_model()},
            {curve.name: known},
        )
        model = state.models["mock"]
        if carried is None:
            assert (model.capacities, model.load_seconds) == ({}, {})
            continue
        assert model.capacities["small"].tokens_per_second == pytest.approx(carried, rel=0.05)
        assert (model.capacities["small"].source, model.load_seconds) == ("bench", {"small": 3})


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_worker_goes_when_it_idles_and_stays_when_its_beats_are_lost(is_heard: bool) -> None:
    """Silence may be the network's: a machine is ended for what it says, not for what it omits."""
    known = MachineList(types=KNOWN.types, machines=KNOWN.machines, policy=ModelPolicy(0, 4, 30.0))
    window, planner, ended = SignalWindow(10), Planner(), list[str]()
    idle = Heartbeat("m-1", "mock", "1", 8, 1, 0, 0, 8, 1, 0, 0.0, type="small")
    for second in range(240):
        now = NOW + second
        window.add_pressure(pressure(0), now)
        if is_heard or second < 60:
            window.add_heartbeat(idle if is_heard else beat(1), now)
        report = window.report(now, {"mock": ()})
        state = build_state(known, PLAN, FleetOrders(), window, report, {"mock": mock_model()}, {})
        ended += [each.machine for each in planner.decide(state, now).ends]
    assert bool(ended) is is_heard
